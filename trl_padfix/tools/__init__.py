"""Diagnosis, data statistics, parity, benchmarks, memory plans: the work of the commands."""
