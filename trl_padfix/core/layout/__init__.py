"""Index maps between a padded batch and its packed row."""
