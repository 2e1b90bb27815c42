"""A person's model: fit once, taught for months."""
