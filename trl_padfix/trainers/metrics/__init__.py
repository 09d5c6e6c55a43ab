"""Token counts and evaluation means of a running trainer."""
