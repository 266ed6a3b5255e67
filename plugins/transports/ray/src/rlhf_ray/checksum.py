"""The checksum by which a maker knows that the weights that arrived are those that were sent."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_ROW = 256
"""Row length of a checksum, in 64-bit words: short, since of small tensors the column sums are what takes hashing."""
_ROWS = 256
"""Rows per block of column sums: few enough that a block stays in the CPU cache."""


class Checksum:
    """Checksum of named tensors at memory speed: row and column sums of their bits, hashed in name order.

    Swapping two words is detected, since at least one changes its row or column. Independent of the division into
    chunks and of their order.
    """

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}

    def add(self, chunk: Mapping[str, Tensor]) -> None:
        for name, tensor in chunk.items():
            self._digests[name] = _tensor_digest(tensor)

    def hexdigest(self) -> str:
        total = hashlib.blake2b(digest_size=16)
        for name in sorted(self._digests):
            total.update(name.encode())
            total.update(self._digests[name])
        return total.hexdigest()


def _tensor_digest(tensor: Tensor) -> bytes:
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()  # words must begin at a multiple of their size
    num_rows = data.numel() // (8 * _ROW)
    # Sums of 64-bit words that wrap around: several times as fast as sums that widen narrower ones.
    rows = data[: num_rows * 8 * _ROW].view(torch.int64).view(-1, _ROW)
    columns = torch.zeros(_ROW, dtype=torch.int64, device=data.device)
    sums = []
    for part in rows.split(_ROWS):
        columns = columns + part.sum(dim=0)
        sums.append(part.sum(dim=1))
    digest = hashlib.blake2b(str((tuple(tensor.shape), str(tensor.dtype))).encode(), digest_size=16)
    digest.update(torch.cat([columns, *sums]).cpu().numpy().tobytes())
    digest.update(data[num_rows * 8 * _ROW :].cpu().numpy().tobytes())
    return digest.digest()
