"""Checks before the first step, and detection of user code that acts in steps."""
