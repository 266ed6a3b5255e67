"""`DetachedReplayBuffer`: the seed's buffer, held in this process or in an actor that several processes share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from rlhf_core.batching import collate, split
from rlhf_core.batching import to_device as moved
from rlhf_core.errors import DeadlineError, RlhfError, UserInputError
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
_CALLS_AT_A_TIME = 32
"""Calls that may wait inside the actor, for room and for a batch each."""

_SharedBatches: Any = ray.remote(  # type: ignore[call-overload]  # Ray's types leave `concurrency_groups` out
    num_cpus=0, concurrency_groups={"put": _CALLS_AT_A_TIME, "get": _CALLS_AT_A_TIME}
)(BatchBuffer)


class DetachedReplayBuffer:
    """Forms batches of `sample_batch_size` samples in the order of their arrival; safe between threads.

    Makers append from other actors, the trainer samples in its own. With `limit` > 0 an append blocks while `limit`
    whole batches wait; nothing is dropped. Experience is kept in CPU memory.

    It lives in the process that made it until it is passed to another one (as an argument of a Ray task or actor, or
    in an object): then an actor of that process holds the entries, and all processes share it. A copy is the same
    buffer.
    """

    def __init__(self, sample_batch_size: int, limit: int = 0, *, timeout_seconds: float = 1800.0) -> None:
        """`limit` of 0 or less means no limit. `timeout_seconds`: longest wait of `append` and `extend` for room and of
        `sample` for a batch.
        """
        self.sample_batch_size = sample_batch_size
        self.limit = limit
        self._timeout_seconds = timeout_seconds
        self._own: BatchBuffer[BufferItem] = BatchBuffer(sample_batch_size, limit)
        self._shared: Any = None
        """The actor, once another process has the buffer, too."""
        self._lock = threading.Lock()
        """Held while it moves there."""

    def append(self, experience: Experience) -> None:
        """Add every sample of a batch of any size. Raises `DeadlineError` when the buffer stays full."""
        self.extend(split(experience))

    def extend(self, items: Sequence[BufferItem]) -> None:
        """Add samples. Raises `DeadlineError` when the buffer stays full."""
        deadline = time.monotonic() + self._timeout_seconds
        left = list(items)
        while left:
            # One by one, as long as it may move to an actor between two.
            part = left[:1] if self._shared is None else left
            self._wait("put", deadline, part)
            del left[: len(part)]

    def clear(self) -> None:
        """Drop all samples, including those that do not fill a batch."""
        self._at_once(BatchBuffer.clear)

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
                batch = self._wait("get", min(deadline, time.monotonic() + _CALL_SECONDS))
                break
            except DeadlineError:
                if time.monotonic() >= deadline:
                    raise
        try:
            return moved(collate(batch), device)
        except BaseException:
            self._at_once(partial(BatchBuffer.give_back, entries=batch))
            raise

    def get_length(self) -> int:
        """Number of whole batches in the buffer."""
        length: int = self._at_once(len)
        return length

    def __reduce__(self) -> tuple[Callable[..., DetachedReplayBuffer], tuple[Any, ...]]:
        """Pass the buffer to another process. Raises `UserInputError` where Ray is not running."""
        return _attached, (self.sample_batch_size, self.limit, self._timeout_seconds, self._share())

    def _share(self) -> Any:
        """Move the batches into an actor and return it; calls waiting here continue there."""
        with self._lock:
            if self._shared is None:
                if not ray.is_initialized():
                    raise UserInputError(
                        "it cannot be handed to another process without Ray", where=_WHERE, hint="call ray.init() first"
                    )
                entries = self._own.drain("it moves to an actor")
                # This may run while Ray serialises an argument, and Ray records that argument's references by thread.
                with ThreadPoolExecutor(1) as pool:
                    start = pool.submit(_SharedBatches.remote, self.sample_batch_size, self.limit, entries)
                    self._shared = start.result()
            return self._shared

    def _wait(self, method: str, deadline: float, *arguments: Any) -> Any:
        """Call a method that waits until the deadline, here or in the actor; again there if it moves meanwhile."""
        if self._shared is None:
            try:
                return getattr(self._own, method)(*arguments, timeout_seconds=max(0.0, deadline - time.monotonic()))
            except RlhfError:
                with self._lock:  # held while it moves
                    if self._shared is None:
                        raise
        seconds = max(0.0, deadline - time.monotonic())
        waiting = getattr(self._shared, method).options(concurrency_group=method)
        return _answer(waiting.remote(*arguments, timeout_seconds=seconds), seconds)

    def _at_once(self, call: Callable[[BatchBuffer[BufferItem]], Any]) -> Any:
        with self._lock:
            if self._shared is None:
                return call(self._own)
        return _answer(self._shared.__ray_call__.remote(call))


def _attached(sample_batch_size: int, limit: int, timeout_seconds: float, shared: Any) -> DetachedReplayBuffer:
    """The same buffer in the process that received it."""
    buffer = DetachedReplayBuffer(sample_batch_size, limit, timeout_seconds=timeout_seconds)
    buffer._shared = shared
    return buffer


def _answer(reference: Any, waits_seconds: float = 0.0) -> Any:
    """The actor's answer. Raises `ActorLostError` when the process that made the buffer is gone."""
    return collect([(_WHERE, reference)], timeout_seconds=waits_seconds + _ANSWER_SECONDS, doing="to answer")[0]
