"""Merges the adapters of one layer by PEFT's code, from full tensors, without touching the layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


class _WithAdapters(nn.Module):
    """Module whose forward pass returns the weight of a LoRA layer with its active adapters."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer: Any = layer

    def forward(self) -> Tensor:
        weight: Tensor = self.layer.base_layer.weight
        for adapter in self.layer.active_adapters:
            if (variant := self.layer.lora_variant.get(adapter)) is None:
                weight = weight + self.layer.get_delta_weight(adapter)
            else:  # such as DoRA
                weight = variant.merge_safe(self.layer, adapter, weight)
        return weight.detach()


def merged_weight(layer: nn.Module, name: str, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the float32 weight of a layer with its active adapters.

    Args:
        layer: PEFT's LoRA layer, possibly sharded.
        name: its name in the model.
        weight: full weight of its base layer, in any floating-point type.
        tensors: full tensors of its adapters, by their names in the model.
    """
    names = [each for each, _ in layer.named_parameters() if "lora_" in each and f"{name}.{each}" in tensors]
    full = {f"layer.{each}": tensors[f"{name}.{each}"].detach().float() for each in names}
    full["layer.base_layer.weight"] = weight.detach().float()
    merged: Tensor = functional_call(_WithAdapters(layer), full, ())
    return merged
