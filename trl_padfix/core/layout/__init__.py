"""Where the tokens of a padded batch lie in one packed row."""
