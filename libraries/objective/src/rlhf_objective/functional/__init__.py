"""Pure functions of tensors: advantages, losses, KL and off-policy correction."""
