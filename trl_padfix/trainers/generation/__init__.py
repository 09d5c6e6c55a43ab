"""Evaluation by generation."""
