"""Ranks as threads of this process, for tests of what ranks compute together without a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from torch import Tensor

    from ..strategy import ReduceOp, Strategy

_PATIENCE_SECONDS = 60.0

T = TypeVar("T")


class Ranks:
    """So many ranks, which reduce and gather through a list."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size, timeout=_PATIENCE_SECONDS)
        self._values: list[Any] = [None] * world_size

    def run(self, work: Callable[[int, Strategy], T]) -> list[T]:
        """Results of `work(rank, strategy)` on each rank; the strategy can only reduce and gather."""
        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(lambda rank: self._work(rank, work), range(self.world_size)))

    def _work(self, rank: int, work: Callable[[int, Strategy], T]) -> T:
        try:
            return work(rank, cast("Strategy", _Rank(rank, self.world_size, self._gather)))
        except BaseException:
            self._barrier.abort()  # the others wait for this rank
            raise

    def _gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


class _Rank:
    def __init__(self, rank: int, world_size: int, gather: Callable[[int, Any], list[Any]]) -> None:
        self.rank = rank
        self.world_size = self.num_processes = world_size
        self._gather = gather

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()

    def unwrap(self, model: T) -> T:
        return model

    def agreed(self, value: T) -> T:
        return value

    def all_gather_objects(self, value: Any) -> list[Any]:
        return self._gather(self.rank, value)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        import torch

        stacked = torch.stack(self._gather(self.rank, tensor))
        return stacked.sum(0) if op == "sum" else stacked.amax(0)
