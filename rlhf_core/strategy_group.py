"""`GroupStrategy`: a strategy whose processes are those of a `ProcessGroup`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from .process_group import ProcessGroup
from .strategy import ReduceOp, Strategy

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class GroupStrategy(Strategy):
    """Rank, device and collective calls. Subclasses say what is done to a model."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size

    @property
    def device(self) -> torch.device:
        return self.group.device

    @property
    def shards_parameters(self) -> bool:
        return False

    @property
    def parameter_dtype(self) -> torch.dtype:
        import torch

        return torch.float32

    @property
    def gradient_average_factor(self) -> int:
        return self.world_size

    def naming_lost_peers(self) -> AbstractContextManager[Any]:
        return self.group.guard("the others")  # calls that a wrapped model makes itself, in its forward pass too

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        return self.group.all_reduce(tensor.to(self.device), op).to(tensor.device)

    def all_gather_objects(self, value: Any) -> list[Any]:
        return self.group.all_gather_objects(value)
