"""Optimizers and learning-rate schedules: core's own, and how those of a run are made."""
