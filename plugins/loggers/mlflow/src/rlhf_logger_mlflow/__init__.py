"""Logs the metrics of runs of the rlhf framework to MLflow."""
