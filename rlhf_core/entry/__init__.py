"""Entry points for commands and users: train, launching processes, inference."""
