"""Entry points for commands and users: train, the quickstart, launching processes, inference."""
