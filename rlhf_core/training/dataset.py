"""Batches of an episode from a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..algorithm import DatasetAlgorithm
from ..batching import to_device
from ..errors import RlhfError
from ..types import Role
from ..wiring.parts import TrainerParts
from .batches import BatchPlan, Units, filled
from .loop import EpisodeBatches

if TYPE_CHECKING:
    from torch import Tensor, nn


class DatasetSource:
    """Episodes of `prompts_per_episode` records in the stream's seeded order, with a reference where one is needed."""

    def __init__(self, run: TrainerParts, algorithm: DatasetAlgorithm[Any, Any], plan: BatchPlan) -> None:
        """Loads the reference."""
        self._algorithm = algorithm
        self._tokenizer = run.inputs.tokenizer
        self._prompts = run.inputs.prompts
        self._plan = plan
        self._place = run.place
        options = run.resolved.run
        self._items_per_episode = options.train.prompts_per_episode
        self._eval_prompts = run.inputs.eval_prompts[None] if run.resolved.measures_eval_records else None
        self._num_held_out = options.eval.num_prompts if options.eval is not None else 0
        self._models = run.pass_models

    def held_out(self) -> list[Any]:
        """This rank's part of the items to evaluate on, without those too long; empty if there are none. Collective."""
        own = self._eval_prompts
        lines = self._prompts.evaluation_records() if own is None else own.evaluation_records(self._num_held_out)
        items = self._prepared(lines)
        units = Units(self._algorithm.units).places(items)[self._place.rank :: self._place.world_size]
        mine = [items[place] for unit in units for place in unit]
        return mine or [self._algorithm.masked(item) for item in items[:1]]

    def episode(self, index: int) -> tuple[Sequence[Any], EpisodeBatches[list[Any]]]:
        """The items of an episode, and their batches."""
        start = index * self._items_per_episode
        lines = [self._prompts.record(start + i) for i in range(self._items_per_episode)]
        items = self._prepared(lines)
        if not items:
            raise RlhfError(
                f"all {len(lines)} records of episode {index} are too long",
                where="prompts",
                hint="raise prompts.max_prompt_tokens, or shorten the records",
            )
        ask_policy, ask_reference = partial(self._ask, "policy"), partial(self._ask, "reference")
        self._algorithm.start_episode(items, policy=ask_policy, reference=ask_reference)
        metrics = {"data/skipped_fraction": 1 - len(items) / len(lines)}
        rows = self._plan.rows([(item,) for item in items])
        return items, EpisodeBatches(filled(rows, dict(enumerate(items)), self._algorithm.masked(items[0])), metrics)

    def _prepared(self, lines: Sequence[Any]) -> list[Any]:
        encoded = [self._algorithm.encode(line, self._tokenizer) for line in lines]
        items = [item for item in encoded if item is not None]
        return list(self._algorithm.prepare_items(items, partial(self._ask, "reference"))) if items else []

    def _ask(self, role: Role, items: Sequence[Any]) -> list[Tensor]:
        """`reference_forward` of one of the run's models over items that every rank has."""
        algorithm = self._algorithm

        def forward(model: nn.Module, some: Sequence[Any]) -> Tensor:
            batch = to_device(algorithm.collate(some), self._models.place.device)
            return algorithm.reference_forward(model, batch)

        return self._models.rows(role, items, forward, empty=algorithm.masked(items[0]), shared=True) if items else []
