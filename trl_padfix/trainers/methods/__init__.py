"""A module for each trainer: its task and its class; and a configuration that TRL has since 1.16."""
