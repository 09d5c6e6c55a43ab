"""The version of the package; its releases read it here."""

__version__ = "0.3.0"

WHERE_TO_REPORT = "This package has no public repository yet: whoever gave it to you takes the report."
"""For messages about errors. The address goes here, and into `[project.urls]`, once there is one."""
