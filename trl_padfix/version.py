"""The version of the package, which the build reads from this file, and where to report errors."""

__version__ = "1.0.0rc1"

WHERE_TO_REPORT = "This package has no public repository yet: whoever gave it to you takes the report."
"""For messages about errors. The address goes here, and into `[project.urls]`, once there is one."""
