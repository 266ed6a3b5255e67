"""Which tensors the lean passes take."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Whether it is an ordinary float32 CPU tensor: sharded and quantised subclasses multiply in their own way."""
    return type(tensor) in _PLAIN and tensor.device.type == "cpu" and tensor.dtype is torch.float32
