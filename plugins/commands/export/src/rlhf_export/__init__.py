"""Plain model folders of runs and checkpoints."""
