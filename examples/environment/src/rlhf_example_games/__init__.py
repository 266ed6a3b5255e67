"""Multi-turn environments."""
