"""Base of this distribution's algorithms: one loss trains the policy alone, on items of a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rlhf_core.algorithm import DatasetAlgorithm, LossTerm
from rlhf_core.types import Role

ItemT = TypeVar("ItemT", bound="MaskableItem")
BatchT = TypeVar("BatchT", bound=Sized)


class MaskableItem(Protocol):
    """An item with a masked copy that does not count."""

    @property
    def num_tokens(self) -> int: ...

    def masked(self: ItemT) -> ItemT: ...


def moved(batch: Any, device: torch.device) -> Any:
    """A batch (a dataclass) with its tensors on `device`, also those of a batch inside it."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    inside = {name: moved(value, device) for name, value in values.items() if is_dataclass(value)}
    tensors = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(batch, **inside, **tensors)


class PolicyOnly(DatasetAlgorithm[ItemT, BatchT]):
    """An algorithm with the one loss term `policy`."""

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset({"policy"})

    @property
    def terms(self) -> Mapping[str, LossTerm]:
        return {"policy": LossTerm("policy")}

    def to_device(self, batch: BatchT, device: torch.device) -> BatchT:
        there: BatchT = moved(batch, device)
        return there

    def masked(self, item: ItemT) -> ItemT:
        return item.masked()
