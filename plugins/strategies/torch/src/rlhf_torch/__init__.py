"""Strategies on plain PyTorch: `single`, `torch-ddp` and `fsdp`."""
