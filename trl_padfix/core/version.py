"""The version of the package; its releases read it here."""

__version__ = "0.3.0"
