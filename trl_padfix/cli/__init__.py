"""The `trl-padfix` command, a module for each of its commands; they import what they need when they run."""
