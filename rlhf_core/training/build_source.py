"""Builds the batch source of a trainer's loop: rollouts or a dataset, with values from the trainer's own models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ..algorithm import DatasetAlgorithm, RolloutAlgorithm
from ..build import TrainerModels, build_eval_prompts, build_reference, offloads_reference
from ..config.resolve import ResolvedRun
from ..models.batched_forward import Reference, no_reference, reference_pass, with_trainer_log_probs
from ..prompts.stream import PromptStream
from ..protocols import ExperienceChannel
from ..rewards.combiner import RewardCombiner
from ..runfolder.metrics import PhaseTimer
from ..strategy import Strategy
from ..types import BufferItem, MadeEpisode
from .batches import BatchPlan
from .estimates import EpisodeEstimates, Estimated
from .sources import DatasetSource, RolloutSource

if TYPE_CHECKING:
    from torch import nn


def build_rollout_source(
    channel: ExperienceChannel,
    algorithm: RolloutAlgorithm,
    combiner: RewardCombiner,
    plan: BatchPlan,
    *,
    policy: nn.Module,
    strategy: Strategy,
    temperature: float,
    batch_tokens: int | None,
    timer: PhaseTimer,
    version: Callable[[], int],
    on_episode: Callable[[int, MadeEpisode, Estimated], None],
    texts: Callable[[int], Sequence[int]] = lambda num_rows: (),
) -> RolloutSource:
    """Episodes from `channel`, with the trainer's log-probs where the algorithm needs them.

    temperature: sampling temperature. timer: counts the log-prob forward passes as `train`.
    texts, on_episode: see `RolloutSource`.
    """

    def complete(rows: Sequence[BufferItem], filler: BufferItem) -> list[BufferItem]:
        if not algorithm.needs_trainer_log_probs:
            return list(rows)
        shared = algorithm.needs == "episode"
        with timer.phase("train"):
            return with_trainer_log_probs(
                rows, policy, strategy, empty=filler, shared=shared, temperature=temperature, batch_tokens=batch_tokens
            )

    estimates = EpisodeEstimates(algorithm, combiner, strategy, complete=complete)
    return RolloutSource(channel, estimates, plan, version=version, texts=texts, on_episode=on_episode)


class DatasetItems:
    """The records of a run's dataset as an algorithm's items, with a reference model where it needs one."""

    def __init__(
        self,
        resolved: ResolvedRun,
        algorithm: DatasetAlgorithm[Any, Any],
        strategy: Strategy,
        models: TrainerModels,
        prompts: PromptStream,
        *,
        batch_tokens: int,
        eval_prompts: Mapping[str | None, PromptStream] | None = None,
    ) -> None:
        """Loads the reference. eval_prompts: of `build_eval_prompts`, where they are built already."""
        self._algorithm = algorithm
        self._tokenizer = models.tokenizer
        self._prompts = prompts
        self._eval_prompts = None
        if resolved.measures_eval_records:
            built = build_eval_prompts(resolved, models.tokenizer) if eval_prompts is None else eval_prompts
            self._eval_prompts = built[None]
        self._num_held_out = resolved.run.eval.num_prompts if resolved.run.eval is not None else 0
        own = Reference(models.policy, nullcontext)
        self._ask_policy = reference_pass(algorithm, own, strategy, batch_tokens=batch_tokens)
        reference = build_reference(resolved, algorithm, strategy, models.policy)
        if reference is None:
            self._ask = no_reference(algorithm)
        else:
            offload = offloads_reference(resolved, strategy)
            self._ask = reference_pass(algorithm, reference, strategy, batch_tokens=batch_tokens, offload=offload)

    def held_out(self) -> Sequence[Any]:
        """The items to evaluate on; those too long are left out. Collective."""
        own = self._eval_prompts
        lines = self._prompts.held_out_records() if own is None else own.first_records(self._num_held_out)
        encoded = [self._encode(line) for line in lines]
        items = [item for item in encoded if item is not None]
        return self._prepare(items) if items else []

    def source(
        self, plan: BatchPlan, *, items_per_episode: int, on_episode: Callable[[int, Sequence[Any]], None]
    ) -> DatasetSource:
        """The items to train on, episode by episode."""
        return DatasetSource(
            self._prompts.record,
            self._algorithm,
            plan,
            items_per_episode=items_per_episode,
            encode=self._encode,
            prepare=self._start,
            on_episode=on_episode,
        )

    def _encode(self, line: Any) -> Any:
        return self._algorithm.encode(line, self._tokenizer)

    def _start(self, items: Sequence[Any]) -> Sequence[Any]:
        prepared = self._prepare(items)
        self._algorithm.start_episode(prepared, policy=self._ask_policy, reference=self._ask)
        return prepared

    def _prepare(self, items: Sequence[Any]) -> Sequence[Any]:
        return list(self._algorithm.prepare_items(items, self._ask))
