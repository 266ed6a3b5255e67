"""`DetachedReplayBuffer`: the seed's buffer, held in this process or in an actor that several processes share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray

from rlhf_core.batching import collate, split
from rlhf_core.batching import to_device as moved
from rlhf_core.errors import DeadlineError, UserInputError
from rlhf_core.types import BufferItem, Experience

from .batch_buffer import BatchBuffer
from .calls import collect

if TYPE_CHECKING:
    import torch

_WHERE = "replay buffer"
_ANSWER_SECONDS = 120.0
"""Longest wait for a shared buffer's answer beyond what it waits for itself, since its process may have to start."""
_CALL_SECONDS = 5.0
"""Longest wait for a batch in one call; a call goes on when its caller is dead, and takes a batch for nobody."""
_CALLS_AT_A_TIME = {"put": 32, "get": 32, "num_batches": 1, "give_back": 1, "clear": 1}
"""Calls of each method that may be open in the actor."""

_SharedBatches: Any = ray.remote(  # type: ignore[call-overload]  # Ray's types leave `concurrency_groups` out
    num_cpus=0, concurrency_groups=_CALLS_AT_A_TIME
)(BatchBuffer)


class DetachedReplayBuffer:
    """Forms batches of `sample_batch_size` samples in the order of their arrival; safe between threads.

    Makers append from other actors, the trainer samples in its own. With `limit` > 0 an append blocks while `limit`
    whole batches wait; nothing is dropped. Experience is kept in CPU memory.

    Where Ray is running, an actor holds the entries, and all processes share it that are given the buffer (as an
    argument of a Ray task or actor, or in an object). A copy is the same buffer. The actor ends with the process that
    made the buffer.
    """

    def __init__(
        self,
        sample_batch_size: int,
        limit: int = 0,
        *,
        timeout_seconds: float = 1800.0,
        is_shared: bool | None = None,
    ) -> None:
        """`limit` of 0 or less means no limit. `timeout_seconds`: longest wait of `append` and `extend` for room and of
        `sample` for a batch. `is_shared`: False keeps the entries in this process; None shares them where Ray is
        running.
        """
        if sample_batch_size < 1:
            raise ValueError(f"sample_batch_size must be >= 1, got {sample_batch_size}")
        self.sample_batch_size = sample_batch_size
        self.limit = limit
        self._timeout_seconds = timeout_seconds
        holder = _SharedBatches.remote if (ray.is_initialized() if is_shared is None else is_shared) else BatchBuffer
        self._batches: Any = holder(sample_batch_size, limit)
        """An actor where it is shared."""

    def append(self, experience: Experience) -> None:
        """Add every sample of a batch of any size. Raises `DeadlineError` when the buffer stays full."""
        self.extend(split(experience))

    def extend(self, items: Sequence[BufferItem]) -> None:
        """Add samples. Raises `DeadlineError` when the buffer stays full."""
        self._call("put", list(items), timeout_seconds=self._timeout_seconds)

    def clear(self) -> None:
        """Drop all samples, including those that do not fill a batch."""
        self._call("clear")

    def sample(
        self, worker_rank: int = 0, to_device: str | torch.device = "cpu", *, timeout_seconds: float | None = None
    ) -> Experience:
        """Take the oldest whole batch, padded to its longest sample, on a device; waits until there is one.

        worker_rank: accepted for the seed's signature; ranks of a tensor-parallel group are not distinguished.
        timeout_seconds: of this call; None takes the buffer's. Raises `DeadlineError` when no batch comes. A batch that
        cannot be moved to the device is put back: the next call takes it.
        """
        import torch

        device = torch.device(to_device)
        deadline = time.monotonic() + (self._timeout_seconds if timeout_seconds is None else timeout_seconds)
        while True:
            try:
                batch = self._call("get", timeout_seconds=min(_CALL_SECONDS, deadline - time.monotonic()))
                break
            except DeadlineError:
                if time.monotonic() >= deadline:
                    raise
        try:
            return moved(collate(batch), device)
        except BaseException:
            self._call("give_back", batch)
            raise

    def get_length(self) -> int:
        """Number of whole batches in the buffer."""
        length: int = self._call("num_batches")
        return length

    def __reduce__(self) -> tuple[Callable[..., DetachedReplayBuffer], tuple[Any, ...]]:
        """Pass the buffer to another process. Raises `UserInputError` where it is in this process only."""
        if isinstance(self._batches, BatchBuffer):
            raise UserInputError(
                "it lies in this process and cannot be handed to another",
                where=_WHERE,
                hint="call ray.init() before you make it",
            )
        return _attached, (self.sample_batch_size, self.limit, self._timeout_seconds, self._batches)

    def _call(self, method: str, *arguments: Any, **timeout: float) -> Any:
        """Call a method of the batches. Raises `ActorLostError` when the process that made the buffer is gone."""
        if isinstance(self._batches, BatchBuffer):
            return getattr(self._batches, method)(*arguments, **timeout)
        call = getattr(self._batches, method).options(concurrency_group=method).remote(*arguments, **timeout)
        wait = timeout.get("timeout_seconds", 0.0) + _ANSWER_SECONDS
        return collect([(_WHERE, call)], timeout_seconds=wait, doing="to answer")[0]


def _attached(sample_batch_size: int, limit: int, timeout_seconds: float, batches: Any) -> DetachedReplayBuffer:
    """The same buffer in the process that received it."""
    buffer = DetachedReplayBuffer(sample_batch_size, limit, timeout_seconds=timeout_seconds, is_shared=False)
    buffer._batches = batches
    return buffer
