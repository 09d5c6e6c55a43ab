"""Diagnosis, data statistics, parity: the work of the commands."""
