"""Prompt sources: problems made in code."""
