"""Wire format of weights: arrays, which intermediaries need not understand.

A weight is a numpy view that enters and leaves the object store without unnecessary copies: torch tensors would be
pickled into every message; an array is written to shared memory once and read there by every maker of the machine.
Types that numpy lacks (bfloat16) are sent as integers of their size. Adapter weights mean nothing without the scale of
their layers, which is sent along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import SyncError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor as an array."""

    array: np.ndarray[Any, Any]
    dtype: str
    """torch's name of the dtype that the bits represent (`bfloat16`)."""


def pack(chunk: Mapping[str, Tensor]) -> dict[str, PackedTensor]:
    """Arrays that share the memory of CPU tensors (others are copied): send them before the tensors change."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    packed: dict[str, PackedTensor] = {}
    for name, tensor in chunk.items():
        plain = tensor.detach().cpu().contiguous()
        dtype = str(plain.dtype).removeprefix("torch.")
        bits = plain if plain.dtype in (torch.float32, torch.float64) else plain.view(integers[plain.element_size()])
        packed[name] = PackedTensor(bits.numpy(), dtype)
    return packed


def unpack(chunk: Mapping[str, PackedTensor | Tensor]) -> dict[str, Tensor]:
    """Read-only tensors that share the arrays' memory; tensors among the values are returned unchanged."""
    return {name: _tensor(value) if isinstance(value, PackedTensor) else value for name, value in chunk.items()}


def num_bytes(chunk: Mapping[str, PackedTensor]) -> int:
    """Size of a packed chunk's data in bytes."""
    return sum(packed.array.nbytes for packed in chunk.values())


def _tensor(packed: PackedTensor) -> Tensor:
    import torch

    tensor = torch.from_numpy(packed.array)
    dtype = getattr(torch, packed.dtype)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


LoraScales = dict[str, dict[str, float]]
"""Layer -> adapter -> scaling of its increment (alpha / r)."""


def lora_scales(model: nn.Module) -> LoraScales:
    """Scales of every PEFT LoRA layer, whether or not the model itself is a PEFT model; empty without any."""
    scales: LoraScales = {}
    for name, module in model.named_modules():
        scaling: Any = getattr(module, "scaling", None)
        if hasattr(module, "lora_A") and isinstance(scaling, Mapping):
            scales[name] = {str(adapter): float(value) for adapter, value in scaling.items()}
    return scales


def check_lora_scales(model: nn.Module, sent: Mapping[str, Mapping[str, float]] | None) -> None:
    """Raise `SyncError` unless the model's LoRA scales equal the sender's. None skips the check."""
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
