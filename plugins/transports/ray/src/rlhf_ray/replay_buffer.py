"""`DetachedReplayBuffer`: the seed's buffer, a thin coat over core's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core.batching import collate, split, to_device
from rlhf_core.buffer import BatchBuffer
from rlhf_core.types import BufferItem, Experience

if TYPE_CHECKING:
    import torch


class DetachedReplayBuffer:
    """Forms batches of `sample_batch_size` samples in the order of their arrival; safe between threads.

    Makers append from other actors, the trainer samples in its own. With `limit` > 0 whoever appends blocks while
    `limit` whole batches wait; nothing is dropped. Experience is kept in CPU memory.
    """

    def __init__(self, sample_batch_size: int, limit: int = 0, *, timeout_seconds: float = 1800.0) -> None:
        """`timeout_seconds`: longest wait of `append` and `extend` for room and of `sample` for a batch."""
        self.sample_batch_size = sample_batch_size
        self.limit = limit
        self._timeout_seconds = timeout_seconds
        self._batches: BatchBuffer[BufferItem] = BatchBuffer(sample_batch_size, limit)

    def append(self, experience: Experience) -> None:
        """Add every sample of a batch of any size. Raises `DeadlineError` when the buffer stays full."""
        self.extend(split(experience))

    def extend(self, items: Sequence[BufferItem]) -> None:
        """Add samples. Raises `DeadlineError` when the buffer stays full."""
        self._batches.put(items, timeout_seconds=self._timeout_seconds)

    def clear(self) -> None:
        """Forget everything, samples that do not fill a batch included."""
        self._batches.clear()

    def sample(
        self, worker_rank: int = 0, to_device: str | torch.device = "cpu", *, timeout_seconds: float | None = None
    ) -> Experience:
        """Take the oldest whole batch, padded to its longest sample, on a device; waits until there is one.

        worker_rank: accepted for the seed's signature; ranks of a tensor-parallel group are not told apart.
        timeout_seconds: of this call; None takes the buffer's. Raises `DeadlineError` when no batch comes.
        """
        waiting = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        return _placed(collate(self._batches.get(timeout_seconds=waiting)), to_device)

    def get_length(self) -> int:
        """Whole batches that wait."""
        return len(self._batches)


def _placed(experience: Experience, device: Any) -> Experience:
    import torch

    return to_device(experience, torch.device(device))
