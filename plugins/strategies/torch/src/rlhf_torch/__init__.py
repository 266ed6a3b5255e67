"""Strategies on plain PyTorch: `single` and `fsdp`."""
