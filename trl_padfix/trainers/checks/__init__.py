"""Checks before the first step, and what of a user's code they detect."""
