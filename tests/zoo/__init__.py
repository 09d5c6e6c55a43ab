"""Tiny random models of every kind, and how each is computed."""
