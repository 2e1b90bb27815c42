"""One file per method; `base.py` is the contract they meet."""
