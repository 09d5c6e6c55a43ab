"""Numbers: layouts, attention over them, and `remove_padding`. Imports no TRL."""
