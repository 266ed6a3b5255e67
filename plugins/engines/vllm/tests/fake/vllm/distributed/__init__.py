"""Nothing is distributed."""
