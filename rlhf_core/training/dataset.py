"""Batches of an episode that is read from a dataset."""

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
    """Episodes of `prompts_per_episode` records in the stream's seeded order, with a reference if it is needed."""

    def __init__(self, run: TrainerParts, algorithm: DatasetAlgorithm[Any, Any], plan: BatchPlan) -> None:
        """Load the reference, if the algorithm needs one."""
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
        """This rank's part of the held-out items, without items that are too long. May be empty. Collective."""
        own = self._eval_prompts
        lines = self._prompts.evaluation_records() if own is None else own.evaluation_records(self._num_held_out)
        items = self._prepare(lines)
        units = Units(self._algorithm.units).places(items)[self._place.rank :: self._place.world_size]
        mine = [items[place] for unit in units for place in unit]
        return mine or [self._algorithm.masked(item) for item in items[:1]]

    def episode(self, index: int) -> tuple[Sequence[Any], EpisodeBatches[list[Any]]]:
        """Items of an episode on all ranks, and this rank's batches. Collective."""
        start = index * self._items_per_episode
        lines = [self._prompts.record(start + i) for i in range(self._items_per_episode)]
        items = self._prepare(lines)
        if not items:
            raise RlhfError(
                f"all {len(lines)} records of episode {index} are too long",
                where="prompts",
                hint="raise prompts.max_prompt_tokens, or shorten the records",
            )
        policy, reference = partial(self._forward, "policy"), partial(self._forward, "reference")
        self._algorithm.start_episode(items, policy=policy, reference=reference)
        metrics = {"data/skipped_fraction": 1 - len(items) / len(lines)}
        rows = self._plan.rows([(item,) for item in items])
        return items, EpisodeBatches(filled(rows, dict(enumerate(items)), self._algorithm.masked(items[0])), metrics)

    def _prepare(self, lines: Sequence[Any]) -> list[Any]:
        encoded = [self._algorithm.encode(line, self._tokenizer) for line in lines]
        items = [item for item in encoded if item is not None]
        return list(self._algorithm.prepare_items(items, partial(self._forward, "reference"))) if items else []

    def _forward(self, role: Role, items: Sequence[Any]) -> list[Tensor]:
        """Rows of `reference_forward` of one of the run's models, for items that every rank has. Collective."""
        algorithm = self._algorithm

        def run(model: nn.Module, some: Sequence[Any]) -> Tensor:
            return algorithm.reference_forward(model, to_device(algorithm.collate(some), self._models.place.device))

        return self._models.rows(role, items, run, empty=algorithm.masked(items[0]), shared=True) if items else []
