"""The version of the package; its releases read it here."""

__version__ = "0.2.0"
