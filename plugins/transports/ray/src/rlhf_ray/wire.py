"""Wire format of weights: arrays, which intermediaries need not understand.

A weight is a numpy view that enters and leaves the object store without unnecessary copies. A torch tensor would be
pickled into every message, while an array is written to shared memory once and read there by every maker of the
machine. dtypes that numpy lacks (bfloat16) are sent as integers of their size. Adapter weights are meaningless without
the scale of their layers, which is sent with them.
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
    """Tensor as a numpy array."""

    array: np.ndarray[Any, Any]
    dtype: str
    """torch's name of the dtype of the bits, such as `bfloat16`."""


def pack(chunk: Mapping[str, Tensor]) -> dict[str, PackedTensor]:
    """Convert tensors to arrays. Arrays share the memory of CPU tensors, so send them before the tensors change.

    Example:
        >>> import torch
        >>> packed = pack({"w": torch.ones(2, dtype=torch.bfloat16)})
        >>> packed["w"].array.dtype, packed["w"].dtype, num_bytes(packed)
        (dtype('int16'), 'bfloat16', 4)
        >>> unpack(packed)["w"]
        tensor([1., 1.], dtype=torch.bfloat16)
    """
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
    """Convert arrays to read-only tensors that share their memory. Values that are tensors are returned unchanged."""
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
    """Scales of every PEFT LoRA layer, whether or not the model itself is a PEFT model. Empty without LoRA layers."""
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
