"""Puts a module in generation mode for the duration of a context, and restores its mode afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def generating(module: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; every submodule's training flag is as before afterwards.

    Not `inference_mode`: a buffer that a forward replaces would be unusable in training.
    """
    training = [part for part in module.modules() if part.training]
    try:
        for part in training:
            part.training = False
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True
