"""Ranks as threads of this process, for testing collective computations without a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_core.place import LocalPlace, Place, ReduceOp

if TYPE_CHECKING:
    from torch import Tensor

_TIMEOUT_SECONDS = 60.0

T = TypeVar("T")


class Ranks:
    """`world_size` ranks that reduce and gather through a shared list."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size, timeout=_TIMEOUT_SECONDS)
        self._values: list[Any] = [None] * world_size

    def run(self, work: Callable[[int, Place], T]) -> list[T]:
        """Run `work(rank, place)` on each rank and return the results."""
        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(lambda rank: self._work(rank, work), range(self.world_size)))

    def _work(self, rank: int, work: Callable[[int, Place], T]) -> T:
        try:
            return work(rank, _Rank(rank, self.world_size, self._gather))
        except BaseException:
            self._barrier.abort()  # the other ranks wait for this one
            raise

    def _gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        gathered = list(self._values)
        self._barrier.wait()
        return gathered


class _Rank(LocalPlace):
    passes = "rlhf_passes.fast_passes:FastPasses"

    def __init__(self, rank: int, world_size: int, gather: Callable[[int, Any], list[Any]]) -> None:
        import torch

        super().__init__(torch.device("cpu"), torch.float32)
        self.rank = rank
        self.world_size = world_size
        self._gather = gather

    def all_gather_objects(self, value: Any) -> list[Any]:
        return self._gather(self.rank, value)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        import torch

        stacked = torch.stack(self._gather(self.rank, tensor))
        return stacked.sum(0) if op == "sum" else stacked.amax(0)
