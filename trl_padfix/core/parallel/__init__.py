"""Context parallelism: one packed row computed by several processes, each of which holds its local tokens."""
