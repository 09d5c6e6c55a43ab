"""Checkpoints that are whole, and training that goes on from them."""
