"""Memory of a prompt's further model inputs, such as pixels, and of the part of the model that reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core import Columns

if TYPE_CHECKING:
    from torch import nn

_FP32 = 4


@dataclass(frozen=True, slots=True)
class InputCost:
    """Mean cost of a prompt. All values are 0 for a model that reads only tokens."""

    stored_bytes: float = 0.0
    """Size of the inputs, which all answers to the prompt share."""
    read_bytes: float = 0.0
    """Size of the inputs in float32, as a forward pass reads them, for each answer."""
    kept_bytes: float = 0.0
    """Activations of the vision tower that a training step keeps, for each answer."""

    @classmethod
    def of(cls, columns: Sequence[Columns], model: nn.Module) -> InputCost:
        """Compute the mean of some prompts.

        Args:
            columns: The columns of each prompt.
            model: The model, of which only the config is read.
        """
        inputs = [value for each in columns for value in each.model_inputs.values()]
        if not inputs:
            return cls()
        stored = sum(value.nbytes for value in inputs) / len(columns)
        pixels = sum(value.numel() for value in inputs if value.dim() > 1) / len(columns)
        return cls(stored, pixels * _FP32, _tower_bytes(getattr(model.config, "vision_config", None), pixels))


def _tower_bytes(tower: Any, num_pixels: float) -> float:
    """Activations of a vision tower, of which each token is a patch of the picture (as `MemoryEstimate`'s layers)."""
    if tower is None:
        return 0.0
    patch, channels = (
        tower.patch_size,
        int(getattr(tower, "num_channels", None) or getattr(tower, "in_channels", None) or 3),
    )
    sides = tuple(patch) if isinstance(patch, list | tuple) else (patch, patch)
    tokens = num_pixels / (channels * math.prod(sides) * int(getattr(tower, "temporal_patch_size", None) or 1))
    hidden = int(getattr(tower, "embed_dim", None) or tower.hidden_size)
    layers = int(getattr(tower, "num_hidden_layers", None) or tower.depth)
    feed_forward = int(getattr(tower, "intermediate_size", None) or hidden * getattr(tower, "mlp_ratio", 4))
    return float(tokens * layers * (8 * hidden + 3 * feed_forward) * _FP32)
