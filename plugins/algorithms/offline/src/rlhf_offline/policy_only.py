"""Base of this distribution's algorithms: one loss trains the policy alone, on items of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

import torch

from rlhf_core.algorithm import Batch, DatasetAlgorithm, Item, LossTerm
from rlhf_core.types import Role

ItemT = TypeVar("ItemT", bound="MaskableItem")
BatchT = TypeVar("BatchT", bound="MovableBatch")


class MaskableItem(Item, Protocol):
    """An item with a masked copy that does not count."""

    def masked(self: ItemT) -> ItemT: ...


class MovableBatch(Batch, Protocol):
    """A batch of tensors."""

    def to(self: BatchT, device: torch.device) -> BatchT: ...


class PolicyOnly(DatasetAlgorithm[ItemT, BatchT]):
    """An algorithm with the one loss term `policy`."""

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset({"policy"})

    @property
    def terms(self) -> Mapping[str, LossTerm]:
        return {"policy": LossTerm("policy")}

    def to_device(self, batch: BatchT, device: torch.device) -> BatchT:
        return batch.to(device)

    def masked(self, item: ItemT) -> ItemT:
        return item.masked()
