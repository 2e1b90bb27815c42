"""What turns fixed features into a classifier; `base.py` is the contract."""
