"""Entry points for commands and users: `train`."""
