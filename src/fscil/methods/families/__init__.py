"""What methods of one kind share."""
