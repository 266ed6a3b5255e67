"""Scores and advantages of an episode, of which each rank computes the part that the algorithm needs it to have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from ..algorithm import RolloutAlgorithm
from ..batching import collate, split, to_device
from ..columns import Columns
from ..errors import RlhfError
from ..models.forward_passes import forward_rows
from ..place import Place
from ..plugins.errors_of import errors_of
from ..rewards.scorer import RewardCombiner
from ..rollout.episode_metrics import ENVIRONMENT, environment_metrics
from ..rollout.samples import GREEDY_REWARDS
from ..runfolder.metrics import PhaseTimer
from ..types import BufferItem, Experience, ItemSummary, MadeEpisode, Rollout
from ..whole import Whole, alone
from .batches import BatchPlan, Rows, rows_of_samples
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
Computed = dict[str, "Tensor | Columns | None"]
"""Their values, and as `columns` those that an algorithm has added or replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated(EpisodeBatches[list[BufferItem]]):
    """This rank's batches of an episode with scores and advantages, and what they are cut from."""

    scores: Sequence[float]
    """Combined reward of each row's sample."""
    items: Sequence[BufferItem]
    """The rows that this rank trains on, in order of `sample_id` and `branch`."""
    rollouts: Sequence[Rollout]
    """The texts asked for."""


class EpisodeEstimates:
    """Makes one score of a sample's rewards, and lets the algorithm compute advantages from what it `needs_all_rows`.

    Mini-batches are cut in `sample_id` order."""

    def __init__(
        self,
        algorithm: RolloutAlgorithm,
        combiner: RewardCombiner,
        place: Place,
        plan: BatchPlan,
        *,
        policy: nn.Module | None = None,
        batch_tokens: int | None = None,
        plugin: str | None = None,
    ) -> None:
        """policy: the trainer's, for an algorithm that `needs_trainer_log_probs`.

        batch_tokens: of its forward passes. plugin: the algorithm's label, for errors.
        """
        self.algorithm = algorithm
        self._combiner = combiner
        self._place = place
        self._plan = plan
        self._policy = policy
        self._batch_tokens = batch_tokens
        self._plugin = plugin

    def of(
        self, made: MadeEpisode, version: int, *, texts: Sequence[int] = (), timer: PhaseTimer | None = None
    ) -> Estimated:
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
        samples, plan = rows_of_samples(made.rows), self._plan
        users = self._users(samples)
        holders = self._holders(made.rows, users)
        held, used = holders[plan.rank], users[plan.rank]
        wanted = sorted({*held, *used} or {0})  # the first row stands in on a rank that has none
        loaded, rollouts = made.data.load(wanted, texts)
        items = dict(zip(wanted, loaded, strict=True))
        whole, metrics = self._whole(made.rows, held)
        filler = self.algorithm.masked(loaded[0])
        given = self._rows([items[row] for row in held], filler, whole, timer or PhaseTimer())
        with errors_of(self._plugin, "advantages"):
            output = self.algorithm.advantages(given)
        computed = _computed(given, output)
        stand_in = self.algorithm.masked(_with(items[held[0]] if held else loaded[0], computed[0]))
        here = dict(zip(held, computed, strict=False))  # without the filler
        elsewhere = set().union(*(rows - set(computes) for rows, computes in zip(users, holders, strict=True)))
        if elsewhere:
            here |= self._exchanged({row: here[row] for row in held if row in elsewhere})
        scores = whole.scores.tolist()
        mine = {row: replace(_with(items[row], here[row]), score=scores[row]) for row in sorted(used)}
        numbers = count()
        batched = [[mine.get(next(numbers), row) for row in rows] for rows in samples]
        return Estimated(
            epochs=plan.batches(batched, lambda _: stand_in),
            # Responses as they were sampled: an algorithm may mask tokens of rows that other ranks have.
            metrics={
                **metrics,
                **output.metrics,
                **_response_metrics(samples, version),
                **environment_metrics([row.columns.get(ENVIRONMENT, {}) for row in made.rows]),
                **made.metrics,
            },
            scores=scores,
            items=list(mine.values()),
            rollouts=rollouts,
        )

    def _whole(self, items: Sequence[ItemSummary], held: Sequence[int]) -> tuple[Whole, dict[str, float]]:
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
        whole = Whole(
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
            all_reduce=alone if self.algorithm.needs_all_rows else self._place.all_reduce,
        )
        return whole, combined.metrics

    def _rows(self, mine: list[BufferItem], filler: BufferItem, whole: Whole, timer: PhaseTimer) -> Experience:
        """The rows that this rank computes, or a filler, as part of the whole."""
        rows = collate(self._with_log_probs(mine, filler, timer) or [filler])
        # A branch may stand here without the others of its sample, or the other way round.
        branches = None if whole.branches is None else whole.here(whole.branches)
        return replace(rows, scores=whole.here(whole.scores), branches=branches, part_of=whole)

    def _with_log_probs(self, mine: list[BufferItem], filler: BufferItem, timer: PhaseTimer) -> list[BufferItem]:
        """The rows with the policy's log-probs, where the algorithm needs them. Collective."""
        algorithm, policy = self.algorithm, self._policy
        if policy is None or not algorithm.needs_trainer_log_probs:
            return mine

        def log_probs(rows: Sequence[BufferItem]) -> Tensor:
            batch = to_device(collate(rows), self._place.device)
            with errors_of(self._plugin, "policy_log_probs"):
                return algorithm.policy_log_probs(policy, batch)

        tokens, shared = self._batch_tokens, algorithm.needs_all_rows
        with timer.phase("train"):
            found = forward_rows(self._place, policy, mine, log_probs, empty=filler, batch_tokens=tokens, shared=shared)
        return [
            replace(row, trainer_log_probs=values[: row.num_response_tokens])
            for row, values in zip(mine, found, strict=True)
        ]

    def _users(self, samples: Sequence[Rows]) -> list[set[int]]:
        """The rows that each rank trains on."""
        plan, rows = self._plan, count()
        places = [[next(rows) for _ in sample] for sample in samples]
        users: list[set[int]] = [set() for _ in range(plan.world_size)]
        for batch in chain.from_iterable(plan.passes(samples)):
            for rank, share in enumerate(plan.shares(samples, batch)):
                users[rank].update(row for index in share for row in places[index])
        return users

    def _holders(self, items: Sequence[ItemSummary], users: Sequence[set[int]]) -> list[list[int]]:
        """The rows from which each rank computes; every row once, unless each rank needs all of them."""
        ranks = range(len(users))
        if self.algorithm.needs_all_rows:
            return [list(range(len(items))) for _ in ranks]
        held: list[list[int]] = [[] for _ in ranks]
        for row in range(len(items)):
            held[next((rank for rank in ranks if row in users[rank]), row % len(ranks))].append(row)
        return held

    def _exchanged(self, made: Mapping[int, Computed]) -> dict[int, Computed]:
        """The given values of all ranks. Collective."""
        import torch

        def each(row: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
            columns = row["columns"].map(lambda values, kind: values if kind.per == "metrics" else change(values))
            return {name: None if row[name] is None else change(row[name]) for name in _COMPUTED} | {"columns": columns}

        # numpy arrays are exchanged by value; tensors would go through shared memory.
        mine = {row: each(values, lambda tensor: tensor.numpy()) for row, values in made.items()}
        parts = self._place.all_gather_objects(mine)
        return {row: each(values, torch.from_numpy) for part in parts for row, values in part.items()}


def _computed(given: Experience, made: Experience) -> list[Computed]:
    """The values of each row that were computed."""
    own = made.columns.only(lambda name, _: made.columns[name] is not given.columns.get(name))
    rows = split(replace(made, columns=own))
    return [{"columns": row.columns} | {name: getattr(row, name) for name in _COMPUTED} for row in rows]


def _with(item: BufferItem, computed: Mapping[str, Any]) -> BufferItem:
    return replace(item, **{**computed, "columns": item.columns | computed["columns"]})


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
