"""Complete checkpoints, and resuming from them."""
