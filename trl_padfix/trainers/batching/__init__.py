"""The rows of an optimizer step: token budgets, micro-batches, prefix groups."""
