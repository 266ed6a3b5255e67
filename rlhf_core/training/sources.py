"""The batch source of the loop that is fed by rollouts: episodes from a channel, cut into batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..algorithm import RolloutAlgorithm
from ..batching import collate, to_device
from ..errors import RlhfError
from ..models.forward_passes import forward_rows
from ..place import Place
from ..plugins.errors_of import errors_of
from ..protocols import ExperienceChannel
from ..rewards.combiner import RewardCombiner
from ..rollout.episode_metrics import ENVIRONMENT, environment_metrics
from ..rollout.made import SamplesLost
from ..runfolder.metrics import PhaseTimer
from ..types import BufferItem, MadeEpisode
from .batches import BatchPlan, TrainBatch, rows_of_samples
from .estimates import EpisodeEstimates, Estimated
from .loop import EpisodeBatches
from .units import Rows

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger("rlhf")


class RolloutSource:
    """Episodes from a channel: scores combined, advantages added, batches in `sample_id` order."""

    def __init__(
        self,
        channel: ExperienceChannel,
        estimates: EpisodeEstimates,
        plan: BatchPlan,
        *,
        version: Callable[[], int],
        on_episode: Callable[[int, MadeEpisode, Estimated], None],
        texts: Callable[[int], Sequence[int]] = lambda num_rows: (),
    ) -> None:
        """`texts`: of so many rows, those whose rollouts `on_episode` wants on this rank."""
        self._channel = channel
        self._estimates = estimates
        self._plan = plan
        self._version = version
        self._texts = texts
        self._on_episode = on_episode

    def episode(self, index: int) -> EpisodeBatches[TrainBatch]:
        made, estimated = self._estimated(index)
        version = self._version()
        metrics = estimated.metrics
        # Of the answers as they were sampled: an algorithm may mask tokens of rows that other ranks have.
        metrics.update(_response_metrics(rows_of_samples(made.rows), version))
        metrics.update(environment_metrics([row.columns.get(ENVIRONMENT, {}) for row in made.rows]))
        metrics.update(made.metrics)
        self._on_episode(index, made, estimated)
        return EpisodeBatches(estimated.batches(version), metrics)

    def _estimated(self, index: int) -> tuple[MadeEpisode, Estimated]:
        while True:
            made = self._channel.episode(index)
            if not made.rows:
                raise RlhfError(
                    f"episode {index} has no sample left: the reward policy dropped all of them",
                    where="rewards",
                    hint="see the rewards' failures in the log, or set on_failure: fail to stop at the first",
                )
            try:
                return made, self._estimates.of(made, self._plan, self._texts(len(made.rows)))
            except SamplesLost as lost:
                logger.warning("%s", lost)


def _response_metrics(samples: Sequence[Rows], version: int) -> dict[str, float]:
    """Lengths (sampled tokens), truncation and staleness of the samples."""
    staleness = [version - min(row.policy_version for row in rows) for rows in samples]
    lengths = [sum(row.num_sampled_tokens for row in rows) for rows in samples]
    mixed = sum(any(row.mixed for row in rows) for rows in samples)
    return {
        **({"staleness/mixed_fraction": mixed / len(samples)} if mixed else {}),
        "response/length_mean": sum(lengths) / len(samples),
        "response/length_max": float(max(lengths)),
        "response/truncated_fraction": sum(rows[-1].truncated for rows in samples) / len(samples),
        "staleness/mean": sum(staleness) / len(samples),
        "staleness/max": float(max(staleness)),
    }


def build_rollout_source(
    channel: ExperienceChannel,
    algorithm: RolloutAlgorithm,
    combiner: RewardCombiner,
    plan: BatchPlan,
    *,
    policy: nn.Module,
    place: Place,
    batch_tokens: int | None,
    timer: PhaseTimer,
    version: Callable[[], int],
    on_episode: Callable[[int, MadeEpisode, Estimated], None],
    texts: Callable[[int], Sequence[int]] = lambda num_rows: (),
    plugin: str | None = None,
) -> RolloutSource:
    """Episodes from `channel`, with the trainer's log-probs where the algorithm needs them.

    timer: counts the log-prob forward passes as `train`. plugin: the algorithm's label, for errors.
    texts, on_episode: see `RolloutSource`.
    """

    def log_probs(rows: Sequence[BufferItem]) -> Tensor:
        batch = to_device(collate(rows), place.device)
        with errors_of(plugin, "policy_log_probs", module=type(algorithm).__module__):
            return algorithm.policy_log_probs(policy, batch)

    def complete(rows: Sequence[BufferItem], filler: BufferItem) -> list[BufferItem]:
        if not algorithm.needs_trainer_log_probs:
            return list(rows)
        shared = algorithm.needs == "episode"
        with timer.phase("train"):
            found = forward_rows(place, policy, rows, log_probs, empty=filler, batch_tokens=batch_tokens, shared=shared)
        return [
            replace(row, trainer_log_probs=values[: row.num_response_tokens])
            for row, values in zip(rows, found, strict=True)
        ]

    estimates = EpisodeEstimates(algorithm, combiner, place, complete=complete, plugin=plugin)
    return RolloutSource(channel, estimates, plan, version=version, texts=texts, on_episode=on_episode)
