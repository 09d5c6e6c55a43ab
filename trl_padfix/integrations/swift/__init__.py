"""Folder of the file that ms-swift loads: `--external_plugins` puts the folder of a file on the import path."""
