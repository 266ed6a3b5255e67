"""Exports runs and checkpoints as plain model folders."""
