"""`DetachedReplayBuffer`: the seed's buffer, in this process or in an actor that several processes share."""

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
"""Maximum wait for a shared buffer's answer, in addition to its own wait: its process may have to start first."""
_CALL_SECONDS = 5.0
"""Maximum wait for a batch in one call. A call survives its caller, and would then take a batch that is lost."""
_MAX_OPEN_CALLS = {"put": 32, "get": 32, "num_batches": 1, "give_back": 1, "clear": 1}
"""Method -> maximum number of open calls in the actor."""

_SharedBatches: Any = ray.remote(  # type: ignore[call-overload]  # Ray's types lack `concurrency_groups`
    num_cpus=0, concurrency_groups=_MAX_OPEN_CALLS
)(BatchBuffer)


class DetachedReplayBuffer:
    """Forms batches of `sample_batch_size` samples in arrival order. Thread-safe.

    Makers append from other actors, and the trainer samples in its own. With `limit` > 0, an append blocks while
    `limit` whole batches wait. Nothing is dropped. Experience is kept in CPU memory.

    If Ray is running, an actor holds the samples, and all processes that receive the buffer (as an argument of a Ray
    task or actor, or in an object) share it. A copy is the same buffer. The actor ends with the process that created
    the buffer.

    Example:
        buffer = DetachedReplayBuffer(sample_batch_size=8, limit=4)
        buffer.append(experience)  # in a maker
        batch = buffer.sample(to_device="cuda")  # in the trainer
    """

    def __init__(
        self,
        sample_batch_size: int,
        limit: int = 0,
        *,
        timeout_seconds: float = 1800.0,
        is_shared: bool | None = None,
    ) -> None:
        """Create an empty buffer.

        Args:
            sample_batch_size: Samples per batch.
            limit: Maximum number of whole batches in the buffer. 0 or less means no limit.
            timeout_seconds: Maximum wait of `append` and `extend` for space, and of `sample` for a batch.
            is_shared: False keeps the samples in this process. None shares them if Ray is running.

        Raises:
            ValueError: `sample_batch_size` is below 1.
        """
        if sample_batch_size < 1:
            raise ValueError(f"sample_batch_size must be >= 1, got {sample_batch_size}")
        self.sample_batch_size = sample_batch_size
        self.limit = limit
        self._timeout_seconds = timeout_seconds
        holder = _SharedBatches.remote if (ray.is_initialized() if is_shared is None else is_shared) else BatchBuffer
        self._batches: Any = holder(sample_batch_size, limit)
        """The batches, or an actor that holds them."""

    def append(self, experience: Experience) -> None:
        """Add every sample of a batch of any size. Raises `DeadlineError` if the buffer stays full."""
        self.extend(split(experience))

    def extend(self, items: Sequence[BufferItem]) -> None:
        """Add samples. Raises `DeadlineError` if the buffer stays full."""
        self._call("put", list(items), timeout_seconds=self._timeout_seconds)

    def clear(self) -> None:
        """Drop all samples, including those that do not fill a batch."""
        self._call("clear")

    def sample(
        self, worker_rank: int = 0, to_device: str | torch.device = "cpu", *, timeout_seconds: float | None = None
    ) -> Experience:
        """Take the oldest whole batch, padded to its longest sample, and wait until there is one.

        A batch that cannot be moved to the device is put back for the next call.

        Args:
            worker_rank: Ignored, part of the seed's signature. Ranks of a tensor-parallel group are not distinguished.
            to_device: Device of the result.
            timeout_seconds: Maximum wait. None uses that of the buffer.

        Returns:
            The batch, on `to_device`.

        Raises:
            DeadlineError: The wait timed out.
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
        """Pass the buffer to another process. Raises `UserInputError` if it exists in this process only."""
        if isinstance(self._batches, BatchBuffer):
            raise UserInputError(
                "it exists in this process only and cannot be passed to another",
                where=_WHERE,
                hint="call ray.init() before you create it",
            )
        return _attach, (self.sample_batch_size, self.limit, self._timeout_seconds, self._batches)

    def _call(self, method: str, *arguments: Any, **timeout: float) -> Any:
        """Call a method of the batches. Raises `ActorLostError` if the process that created the buffer has exited."""
        if isinstance(self._batches, BatchBuffer):
            return getattr(self._batches, method)(*arguments, **timeout)
        call = getattr(self._batches, method).options(concurrency_group=method).remote(*arguments, **timeout)
        wait = timeout.get("timeout_seconds", 0.0) + _ANSWER_SECONDS
        return collect([(_WHERE, call)], timeout_seconds=wait, doing="to answer")[0]


def _attach(sample_batch_size: int, limit: int, timeout_seconds: float, batches: Any) -> DetachedReplayBuffer:
    """Recreate the buffer in the process that received it."""
    buffer = DetachedReplayBuffer(sample_batch_size, limit, timeout_seconds=timeout_seconds, is_shared=False)
    buffer._batches = batches
    return buffer
