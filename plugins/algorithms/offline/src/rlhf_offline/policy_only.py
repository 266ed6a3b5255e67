"""Base of this distribution's algorithms: one loss trains the policy alone, on items of a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, Protocol, Self, TypeVar

from rlhf_core.algorithm import DatasetAlgorithm, LossTerm
from rlhf_core.components import AlgorithmContext
from rlhf_core.types import Role

ItemT = TypeVar("ItemT", bound="MaskableItem")
BatchT = TypeVar("BatchT", bound=Sized)


class MaskableItem(Protocol):
    """An item with a masked copy that does not count."""

    @property
    def num_tokens(self) -> int: ...

    def masked(self) -> Self: ...


class PolicyOnly(DatasetAlgorithm[ItemT, BatchT]):
    """An algorithm with the one loss term `policy`."""

    config: Any
    """Its options; each algorithm says of which class."""

    def __init__(self, config: Any, context: AlgorithmContext) -> None:
        self.config = config

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset({"policy"})

    @property
    def terms(self) -> Mapping[str, LossTerm]:
        return {"policy": LossTerm("policy")}

    def masked(self, item: ItemT) -> ItemT:
        return item.masked()
