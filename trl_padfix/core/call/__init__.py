"""One call of a model: its layout, its arguments, and the state that the patches of the call share."""
