"""A model as other programs read it."""
