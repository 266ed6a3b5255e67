"""How the LoRA layers of a model are scaled: sent along with adapter weights, which mean nothing without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import SyncError

if TYPE_CHECKING:
    from torch import nn

LoraScales = dict[str, dict[str, float]]
"""Layer -> adapter -> scaling of its increment (alpha / r)."""


def lora_scales(model: nn.Module) -> LoraScales:
    """Of every LoRA layer (PEFT's), whether or not the model itself is a PEFT model; empty without any."""
    scales: LoraScales = {}
    for name, module in model.named_modules():
        scaling: Any = getattr(module, "scaling", None)
        if hasattr(module, "lora_A") and isinstance(scaling, Mapping):
            scales[name] = {str(adapter): float(value) for adapter, value in scaling.items()}
    return scales


def check_lora_scales(model: nn.Module, sent: Mapping[str, Mapping[str, float]] | None) -> None:
    """Raise `SyncError` unless the model's LoRA layers are the sender's. None is not checked."""
    if sent is None:
        return
    own = lora_scales(model)
    if own == sent:
        return
    differing = sorted(name for name in own.keys() | sent.keys() if own.get(name) != sent.get(name))
    first = differing[0]
    raise SyncError(
        f"{len(differing)} LoRA layers differ, the first is {first}: {own.get(first)} here, {sent.get(first)} sent",
        where="weight sync",
        hint="trainer and maker must load the same model with the same lora options",
    )
