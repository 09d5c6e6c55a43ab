"""One call of a model: its layout, its arguments, and what its parts have to tell each other."""
