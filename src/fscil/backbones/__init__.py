"""Frozen timm Vision Transformers and what is tuned inside them."""
