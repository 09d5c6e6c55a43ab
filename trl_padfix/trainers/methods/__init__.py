"""A module for each trainer: its task, its configuration if it is not in `config.py`, its class."""
