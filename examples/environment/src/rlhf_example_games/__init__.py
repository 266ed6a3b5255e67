"""Environments of several turns."""
