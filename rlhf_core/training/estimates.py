"""Scores and advantages of an episode, of which each rank computes the part that the algorithm needs it to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..algorithm import RolloutAlgorithm
from ..batching import collate, split, to_device
from ..episode_view import EpisodeView, single_rank
from ..errors import RlhfError
from ..models.passes import GroupPasses
from ..place import Place
from ..plugins.errors_of import errors_of
from ..rewards.scorer import RewardCombiner
from ..rollout.episode_metrics import ENVIRONMENT, environment_metrics
from ..rollout.samples import GREEDY_REWARDS
from ..runfolder.metrics import PhaseTimer
from ..types import BufferItem, CollectedEpisode, Experience, ItemSummary, Rollout
from .batches import BatchPlan, Rows, filled, rows_of_samples
from .loop import EpisodeBatches

if TYPE_CHECKING:
    from torch import Tensor, nn

_COMPUTED = (
    "action_mask",
    "action_log_probs",
    "reference_log_probs",
    "trainer_log_probs",
    "values",
    "advantages",
    "returns",
)
"""The fields of a row that are computed here, or may be replaced by an algorithm: those of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedEpisode(EpisodeBatches[list[BufferItem]]):
    """This rank's batches of an episode with scores and advantages, and what they are cut from."""

    scores: Sequence[float]
    """Combined reward of each row's sample."""
    items: Sequence[BufferItem]
    """The rows that this rank trains on, in order of `sample_id` and `branch`."""
    rollouts: Sequence[Rollout]
    """The texts asked for."""


class EpisodeEstimator:
    """Makes one score of a sample's rewards, and lets the algorithm compute advantages from what it `needs_all_rows`.

    Mini-batches are cut in `sample_id` order."""

    def __init__(
        self,
        algorithm: RolloutAlgorithm,
        combiner: RewardCombiner,
        place: Place,
        plan: BatchPlan,
        *,
        models: GroupPasses | None = None,
        plugin: str | None = None,
    ) -> None:
        """models: the trainer's policy, for an algorithm that `needs_trainer_log_probs`.

        plugin: the algorithm's label, for errors.
        """
        self.algorithm = algorithm
        self._combiner = combiner
        self._place = place
        self._plan = plan
        self._has_all_rows = algorithm.needs_all_rows or plan.mixes_ranks
        self._models = models
        self._plugin = plugin

    def of(
        self, made: CollectedEpisode, version: int, *, texts: Sequence[int] = (), timer: PhaseTimer | None = None
    ) -> EstimatedEpisode:
        """Collective. Raises `SamplesLost` before anything is changed.

        version: of the trainer's weights. texts: rows whose rollouts this rank wants. timer: counts forward passes as
        `train`.
        """
        if not made.rows:
            raise RlhfError(
                "an episode has no sample left: the reward policy dropped all of them",
                where="rewards",
                hint="see the rewards' failures in the log, or set on_failure: fail to stop at the first",
            )
        samples = rows_of_samples(made.rows)
        passes = self._plan.rows(samples)
        used = sorted({row for batches in passes for batch in batches for row in batch})
        held = list(range(len(made.rows))) if self._has_all_rows else used
        items, rollouts = made.data.load(held or [0], texts)
        if not held:  # in step with the other ranks
            items = [self.algorithm.masked(items[0])]
        view, metrics = self._view(made.rows, held)
        given = self._given(items, view, timer or PhaseTimer())
        with errors_of(self._plugin, "advantages"):
            output = self.algorithm.advantages(given)
        scores = view.scores.tolist()
        done = [
            _with_computed(item, row, scores[number])
            for number, item, row in zip(held or [0], items, _computed(given, output), strict=True)
        ]
        mine = dict(zip(held, done, strict=False))
        return EstimatedEpisode(
            epochs=filled(passes, mine, self.algorithm.masked(done[0])),
            # Responses as they were sampled: an algorithm may mask tokens of rows that other ranks have.
            metrics={
                **metrics,
                **output.metrics,
                **_response_metrics(samples, version),
                **environment_metrics([row.columns.get(ENVIRONMENT, {}) for row in made.rows]),
                **made.metrics,
            },
            scores=scores,
            items=[mine[row] for row in used],
            rollouts=rollouts,
        )

    def _view(self, items: Sequence[ItemSummary], held: Sequence[int]) -> tuple[EpisodeView, dict[str, float]]:
        """The episode as seen by a rank that computes from the rows `held`, and metrics of its scores."""
        import torch

        raw = _columns([item.rewards for item in items])
        counted = [items[0].sample_id - 1, *(item.sample_id for item in items[:-1])]
        first = torch.tensor([item.sample_id != before for item, before in zip(items, counted, strict=True)])
        combined = self._combiner.combine(raw, counts=first)
        greedy = [item.columns[GREEDY_REWARDS] for item in items if GREEDY_REWARDS in item.columns]
        greedy_scores = self._combiner.combine_as_before(_columns(greedy)) if greedy else None
        if greedy_scores is not None:
            combined.metrics["rollout/greedy_score_mean"] = float(greedy_scores[first].mean())
        branches = torch.tensor([item.branch for item in items])
        view = EpisodeView(
            sample_ids=torch.tensor([item.sample_id for item in items]),
            group_ids=torch.tensor([item.group_id for item in items]),
            scores=combined.scores,
            greedy_scores=greedy_scores,
            lengths=torch.tensor([item.num_sampled_tokens for item in items]),
            rewards=raw,
            weights=self._combiner.weights,
            branches=branches if branches.any() else None,
            rows=torch.tensor(held or [-1]),
            # Where every rank has all rows, there is nothing to add up.
            all_reduce=single_rank if self._has_all_rows else self._place.all_reduce,
        )
        return view, combined.metrics

    def _given(self, items: list[BufferItem], view: EpisodeView, timer: PhaseTimer) -> Experience:
        """The rows that this rank computes from, as part of the whole. Collective."""
        rows = collate(self._with_log_probs(items, timer))
        # A branch may stand here without the others of its sample, or the other way round.
        branches = None if view.branches is None else view.local(view.branches)
        return replace(rows, scores=view.local(view.scores), branches=branches, view=view)

    def _with_log_probs(self, items: list[BufferItem], timer: PhaseTimer) -> list[BufferItem]:
        """The rows with the policy's log-probs, where the algorithm needs them. Collective."""
        algorithm, models = self.algorithm, self._models
        if models is None or not algorithm.needs_trainer_log_probs:
            return items

        def log_probs(policy: nn.Module, rows: Sequence[BufferItem]) -> Tensor:
            batch = to_device(collate(rows), self._place.device)
            with errors_of(self._plugin, "policy_log_probs"):
                return algorithm.policy_log_probs(policy, batch)

        empty, shared = algorithm.masked(items[0]), self._has_all_rows
        with timer.phase("train"):
            found = models.rows("policy", items, log_probs, empty=empty, shared=shared)
        return [
            replace(row, trainer_log_probs=values[: row.num_response_tokens])
            for row, values in zip(items, found, strict=True)
        ]


def _computed(given: Experience, made: Experience) -> list[BufferItem]:
    """The rows as an algorithm returned them, with only those columns that it has added or replaced."""
    return split(replace(made, columns=made.columns.only(lambda n, _: made.columns[n] is not given.columns.get(n))))


def _with_computed(item: BufferItem, row: BufferItem, score: float) -> BufferItem:
    computed: dict[str, Any] = {name: getattr(row, name) for name in _COMPUTED}
    return replace(item, **computed, columns=item.columns | row.columns, score=score)


def _columns(rewards: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
    """Name -> [B] float32."""
    import torch

    return {name: torch.tensor([each[name] for each in rewards], dtype=torch.float32) for name in rewards[0]}


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
