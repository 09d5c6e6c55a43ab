"""A module for each trainer: its task and its class."""
