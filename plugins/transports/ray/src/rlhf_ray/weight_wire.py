"""Weights in the object store: numpy views go in and come out without a copy that needs not be.

torch tensors would be pickled into every message; an array is written to shared memory once and read there by every
maker of the machine. Types that numpy does not have (bfloat16) travel as integers of their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor as an array."""

    array: np.ndarray[Any, Any]
    dtype: str
    """torch's name of the type the bits stand for (`bfloat16`)."""


def pack(chunk: Mapping[str, Tensor]) -> dict[str, PackedTensor]:
    """Arrays over the memory of CPU tensors, over a copy of others: hand them on before the tensors change."""
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
    """Tensors over the arrays' memory, for reading only; a tensor among them stays itself."""
    return {name: _tensor(value) if isinstance(value, PackedTensor) else value for name, value in chunk.items()}


def num_bytes(chunk: Mapping[str, PackedTensor]) -> int:
    """Size of a packed chunk's data."""
    return sum(packed.array.nbytes for packed in chunk.values())


def _tensor(packed: PackedTensor) -> Tensor:
    import numpy as np
    import torch

    array = packed.array
    if not array.flags.writeable and array.size:
        array = np.asarray(_Writable(array))
    tensor = torch.from_numpy(array)
    dtype = getattr(torch, packed.dtype)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


class _Writable:
    """The object store's arrays are read-only, which torch has no word for and warns about; nobody writes them."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self._owner = array
