"""Attention over a layout."""
