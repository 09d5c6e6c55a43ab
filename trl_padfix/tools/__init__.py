"""Diagnosis, data statistics and tiny models: the work of the commands."""
