"""Frozen models beside a half-precision policy: whole, and of the policy's own type."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def cast_frozen(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Place a model that is only run forward; parameters are cast, computed buffers keep their precision.

    A reference of another type than the policy would differ from it before the first update.
    """
    model.requires_grad_(False).eval().to(device)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model
