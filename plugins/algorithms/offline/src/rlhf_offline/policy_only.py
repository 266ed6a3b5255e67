"""Base of this distribution's algorithms: one loss trains the policy alone, on items of a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_core.algorithm import DatasetAlgorithm, LossTerm
from rlhf_core.components import AlgorithmContext
from rlhf_core.types import Role

if TYPE_CHECKING:
    from .answers import Answers
    from .examples import Example

ItemT = TypeVar("ItemT", "Example", "Answers")
BatchT = TypeVar("BatchT", bound=Sized)


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
