"""The features of a trainer, each a part that `base.py` calls in order."""
