"""Logs the numbers of runs of the rlhf framework to MLflow."""
