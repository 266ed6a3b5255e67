"""Scores and advantages of an episode. Each rank computes the part that the algorithm needs."""

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
"""Per-token fields of a row, which are computed here or may be replaced by an algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedEpisode(EpisodeBatches[list[BufferItem]]):
    """This rank's batches of an episode with scores and advantages, and the rows that they contain."""

    scores: Sequence[float]
    """Combined reward of each row's sample, for all rows of the episode."""
    items: Sequence[BufferItem]
    """Rows that this rank trains on, sorted by `sample_id` and `branch`."""
    rollouts: Sequence[Rollout]
    """Rollouts of the requested `texts`."""


class EpisodeEstimator:
    """Combines the rewards of each sample into a score, and computes advantages with the algorithm.

    The algorithm receives all rows if it `needs_all_rows`, otherwise this rank's rows. Batches are cut in `sample_id`
    order.
    """

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
        """Create the estimator of a trainer process.

        Args:
            algorithm: Computes the advantages.
            combiner: Combines the rewards.
            place: Ranks that share the episode.
            plan: Split of the episode into batches.
            models: The trainer's policy, for an algorithm that `needs_trainer_log_probs`.
            plugin: Label of the algorithm, for errors.
        """
        self.algorithm = algorithm
        self._combiner = combiner
        self._place = place
        self._plan = plan
        self._has_all_rows = algorithm.needs_all_rows or plan.mixes_ranks
        self._models = models
        self._plugin = plugin

    def of(
        self, collected: CollectedEpisode, version: int, *, texts: Sequence[int] = (), timer: PhaseTimer | None = None
    ) -> EstimatedEpisode:
        """Estimate an episode. Collective.

        Args:
            collected: The episode, the same on every rank.
            version: Policy version of the trainer's weights.
            texts: Rows whose rollouts this rank needs.
            timer: Counts forward passes as `train`.

        Raises:
            SamplesLost: Samples are lost. Nothing has changed yet.
            RlhfError: All samples were dropped.
        """
        if not collected.rows:
            raise RlhfError(
                "all samples of an episode were dropped by the rewards' on_failure",
                where="rewards",
                hint="see the rewards' failures in the log, or set on_failure: fail to stop at the first",
            )
        samples = rows_of_samples(collected.rows)
        passes = self._plan.rows(samples)
        used = sorted({row for batches in passes for batch in batches for row in batch})
        local = list(range(len(collected.rows))) if self._has_all_rows else used
        items, rollouts = collected.data.load(local or [0], texts)
        if not local:  # in lockstep with the other ranks
            items = [self.algorithm.masked(items[0])]
        view, metrics = self._view(collected.rows, local)
        rows = self._local_rows(items, view, timer or PhaseTimer())
        with errors_of(self._plugin, "advantages"):
            output = self.algorithm.advantages(rows)
        scores = view.scores.tolist()
        estimated = [
            _with_computed(item, row, scores[number])
            for number, item, row in zip(local or [0], items, _computed(rows, output), strict=True)
        ]
        by_row = dict(zip(local, estimated, strict=False))
        return EstimatedEpisode(
            epochs=filled(passes, by_row, self.algorithm.masked(estimated[0])),
            # Lengths as sampled: an algorithm may mask tokens of rows that other ranks hold.
            metrics={
                **metrics,
                **output.metrics,
                **_response_metrics(samples, version),
                **environment_metrics([row.columns.get(ENVIRONMENT, {}) for row in collected.rows]),
                **collected.metrics,
            },
            scores=scores,
            items=[by_row[row] for row in used],
            rollouts=rollouts,
        )

    def _view(self, items: Sequence[ItemSummary], local: Sequence[int]) -> tuple[EpisodeView, dict[str, float]]:
        """View of the episode for a rank with the rows `local`, and metrics of the scores."""
        import torch

        raw = _columns([item.rewards for item in items])
        previous = [items[0].sample_id - 1, *(item.sample_id for item in items[:-1])]
        first = torch.tensor([item.sample_id != before for item, before in zip(items, previous, strict=True)])
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
            rows=torch.tensor(local or [-1]),
            # If every rank has all rows, nothing is summed over ranks.
            all_reduce=single_rank if self._has_all_rows else self._place.all_reduce,
        )
        return view, combined.metrics

    def _local_rows(self, items: list[BufferItem], view: EpisodeView, timer: PhaseTimer) -> Experience:
        """Batch of the rows that this rank computes from, with the view of the whole episode. Collective."""
        # Model inputs may be large, and advantages do not depend on them.
        rows = collate(self._with_log_probs(items, timer), with_inputs=False)
        # This rank may hold one branch of a sample without the others, so branches come from the view.
        branches = None if view.branches is None else view.local(view.branches)
        return replace(rows, scores=view.local(view.scores), branches=branches, view=view)

    def _with_log_probs(self, items: list[BufferItem], timer: PhaseTimer) -> list[BufferItem]:
        """Return the rows with the policy's log-probs if the algorithm needs them. Collective."""
        algorithm, models = self.algorithm, self._models
        if models is None or not algorithm.needs_trainer_log_probs:
            return items

        def log_probs(policy: nn.Module, rows: Sequence[BufferItem]) -> Tensor:
            batch = to_device(collate(rows), self._place.device)
            with errors_of(self._plugin, "policy_log_probs"):
                return algorithm.policy_log_probs(policy, batch)

        empty, shared = algorithm.masked(items[0]), self._has_all_rows
        with timer.phase("train"):
            padded = models.rows("policy", items, log_probs, empty=empty, shared=shared)
        pairs = zip(items, padded, strict=True)
        return [replace(row, trainer_log_probs=values[: row.num_response_tokens]) for row, values in pairs]


def _computed(rows: Experience, output: Experience) -> list[BufferItem]:
    """Rows that an algorithm returned, with only those columns that it has added or replaced."""
    old, new = rows.columns, output.columns
    return split(replace(output, columns=new.only(lambda name, _: new[name] is not old.get(name))))


def _with_computed(item: BufferItem, row: BufferItem, score: float) -> BufferItem:
    computed: dict[str, Any] = {name: getattr(row, name) for name in _COMPUTED}
    return replace(item, **computed, columns=item.columns | row.columns, score=score)


def _columns(rewards: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
    """Name -> [B] float32."""
    import torch

    return {name: torch.tensor([each[name] for each in rewards], dtype=torch.float32) for name in rewards[0]}


def _response_metrics(samples: Sequence[Rows], version: int) -> dict[str, float]:
    """Metrics on length (sampled tokens), truncation and staleness of the samples."""
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
