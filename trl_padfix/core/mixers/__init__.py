"""What in a decoder mixes tokens, and how each of it runs on a packed row."""
