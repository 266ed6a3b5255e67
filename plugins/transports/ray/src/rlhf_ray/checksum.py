"""Checksum that a maker uses to verify that it received the weights that were sent."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_ROW = 256
"""Row length in 64-bit words: short, since hashing the column sums dominates the cost for small tensors."""
_ROWS = 256
"""Rows per block of column sums: few enough for a block to stay in the CPU cache."""


class Checksum:
    """Checksum of named tensors at memory speed: row and column sums of their bits, hashed in name order.

    It detects a swap of two words, since at least one changes its row or column. It depends neither on the division
    into chunks nor on their order.

    Example:
        >>> import torch
        >>> sent, received = Checksum(), Checksum()
        >>> sent.add({"a": torch.ones(3), "b": torch.zeros(2)})
        >>> for chunk in ({"b": torch.zeros(2)}, {"a": torch.ones(3)}):
        ...     received.add(chunk)
        >>> sent.hexdigest() == received.hexdigest()
        True
    """

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}

    def add(self, chunk: Mapping[str, Tensor]) -> None:
        """Add tensors by name."""
        for name, tensor in chunk.items():
            self._digests[name] = _tensor_digest(tensor)

    def hexdigest(self) -> str:
        """Checksum of all tensors added so far."""
        total = hashlib.blake2b(digest_size=16)
        for name in sorted(self._digests):
            total.update(name.encode())
            total.update(self._digests[name])
        return total.hexdigest()


def _tensor_digest(tensor: Tensor) -> bytes:
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()  # 64-bit words must be aligned
    num_rows = data.numel() // (8 * _ROW)
    # Sums of 64-bit words wrap around, and are several times as fast as sums that widen narrower words.
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
