"""The version of the package, which the build reads from this file."""

__version__ = "1.0.0rc2.dev0"
