"""Padding removal for trainers of other packages: a callback, and plug-ins of other stacks built on it."""
