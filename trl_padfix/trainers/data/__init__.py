"""Rows and batches: columns, checks, collators, and the layouts that come with a batch."""
