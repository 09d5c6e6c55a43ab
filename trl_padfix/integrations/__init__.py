"""Padding removal for trainers that are not this package's: a callback, and plug-ins of other stacks made of it."""
