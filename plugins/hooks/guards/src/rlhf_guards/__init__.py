"""Guards that warn, skip, stop or roll back, and early stopping."""
