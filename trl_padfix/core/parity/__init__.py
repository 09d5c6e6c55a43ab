"""Packed against padded, on the model and the batch of a user."""
