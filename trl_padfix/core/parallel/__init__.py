"""Context parallelism: one packed row computed by several processes; each holds its local tokens."""
