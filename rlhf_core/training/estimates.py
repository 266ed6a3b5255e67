"""Scores and advantages of an episode, of which each rank computes the part that the algorithm needs it to have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from ..algorithm import RolloutAlgorithm
from ..batching import collate, split, to_device
from ..columns import Columns
from ..models.forward_passes import forward_rows
from ..place import Place
from ..plugins.errors_of import errors_of
from ..rewards.scorer import RewardCombiner
from ..rollout.samples import GREEDY_REWARDS
from ..runfolder.metrics import PhaseTimer
from ..types import BufferItem, Experience, ItemSummary, MadeEpisode, Rollout
from ..whole import EpisodeScalars, Whole, alone
from .batches import BatchPlan, TrainBatch, rows_of_samples

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


@dataclass(frozen=True, slots=True)
class Estimated:
    """An episode with scores, of which this rank holds the rows that it trains on, with advantages."""

    rows: Sequence[ItemSummary]
    scores: Sequence[float]
    """Combined reward of each row's sample."""
    items: Sequence[BufferItem]
    """In order of `sample_id` and `branch`."""
    rollouts: Sequence[Rollout]
    """The texts asked for."""
    filler: BufferItem
    """A masked row, for a batch of which this rank has none."""
    metrics: dict[str, float]
    plan: BatchPlan

    def batches(self, version: int) -> Iterator[Iterator[TrainBatch]]:
        """This rank's part of each batch, pass by pass. `version`: the policy version of the trainer's weights."""
        mine = {(item.sample_id, item.branch): item for item in self.items}
        samples = [[mine.get((row.sample_id, row.branch), row) for row in rows] for rows in rows_of_samples(self.rows)]
        return self.plan.batches(samples, lambda _: self.filler, version)


class EpisodeEstimates:
    """Makes one score of a sample's rewards, and lets the algorithm compute advantages from what it `needs`."""

    def __init__(
        self,
        algorithm: RolloutAlgorithm,
        combiner: RewardCombiner,
        place: Place,
        *,
        policy: nn.Module | None = None,
        batch_tokens: int | None = None,
        timer: PhaseTimer | None = None,
        plugin: str | None = None,
    ) -> None:
        """policy: the trainer's, for an algorithm that `needs_trainer_log_probs`.

        batch_tokens: of its forward passes. timer: counts these as `train`. plugin: the algorithm's label, for errors.
        """
        self.algorithm = algorithm
        self._combiner = combiner
        self._place = place
        self._policy = policy
        self._batch_tokens = batch_tokens
        self._timer = timer or PhaseTimer()
        self._plugin = plugin

    def of(self, made: MadeEpisode, plan: BatchPlan, texts: Sequence[int] = ()) -> Estimated:
        """`texts`: rows whose rollouts this rank wants. Collective. Raises `SamplesLost` before anything is changed."""
        users = self._users(made.rows, plan)
        holders = self._holders(made.rows, users)
        held, used = holders[plan.rank], users[plan.rank]
        wanted = sorted({*held, *used} or {0})  # the first row stands in on a rank that has none
        loaded, rollouts = made.data.load(wanted, texts)
        items = dict(zip(wanted, loaded, strict=True))
        scalars, metrics = self._scalars(made.rows)
        filler = self.algorithm.masked(loaded[0])
        given = self._rows([items[row] for row in held], filler, scalars, held)
        with errors_of(self._plugin, "advantages"):
            output = self.algorithm.advantages(given)
        computed = _computed(given, output.experience)
        stand_in = _with(items[held[0]] if held else loaded[0], computed[0])
        here = dict(zip(held, computed, strict=False))  # without the filler
        elsewhere = set().union(*(rows - set(computes) for rows, computes in zip(users, holders, strict=True)))
        if elsewhere:
            here |= self._exchanged({row: here[row] for row in held if row in elsewhere})
        scores = scalars.scores.tolist()
        return Estimated(
            rows=made.rows,
            scores=scores,
            items=[replace(_with(items[row], here[row]), score=scores[row]) for row in sorted(used)],
            rollouts=rollouts,
            filler=self.algorithm.masked(stand_in),
            metrics={**metrics, **output.metrics},
            plan=plan,
        )

    def _scalars(self, items: Sequence[ItemSummary]) -> tuple[EpisodeScalars, dict[str, float]]:
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
        scalars = EpisodeScalars(
            sample_ids=torch.tensor([item.sample_id for item in items]),
            group_ids=torch.tensor([item.group_id for item in items]),
            scores=combined.scores,
            greedy_scores=greedy_scores,
            lengths=torch.tensor([item.num_sampled_tokens for item in items]),
            rewards=raw,
            weights=self._combiner.weights,
            branches=branches if branches.any() else None,
        )
        return scalars, combined.metrics

    def _rows(
        self, mine: list[BufferItem], filler: BufferItem, scalars: EpisodeScalars, held: Sequence[int]
    ) -> Experience:
        """The rows that this rank computes, or a filler, as part of the whole."""
        import torch

        rows = collate(self._with_log_probs(mine, filler) or [filler])
        whole = Whole(scalars=scalars, rows=torch.tensor(held or [-1]), all_reduce=self._place.all_reduce)
        if self.algorithm.needs == "episode":  # every rank has all rows: there is nothing to add up
            whole = replace(whole, all_reduce=alone)
        # A branch may stand here without the others of its sample, or the other way round.
        branches = None if scalars.branches is None else whole.here(scalars.branches)
        return replace(rows, scores=whole.here(scalars.scores), branches=branches, part_of=whole)

    def _with_log_probs(self, mine: list[BufferItem], filler: BufferItem) -> list[BufferItem]:
        """The rows with the policy's log-probs, where the algorithm needs them. Collective."""
        algorithm, policy = self.algorithm, self._policy
        if policy is None or not algorithm.needs_trainer_log_probs:
            return mine

        def log_probs(rows: Sequence[BufferItem]) -> Tensor:
            batch = to_device(collate(rows), self._place.device)
            with errors_of(self._plugin, "policy_log_probs"):
                return algorithm.policy_log_probs(policy, batch)

        tokens, shared = self._batch_tokens, algorithm.needs == "episode"
        with self._timer.phase("train"):
            found = forward_rows(self._place, policy, mine, log_probs, empty=filler, batch_tokens=tokens, shared=shared)
        return [
            replace(row, trainer_log_probs=values[: row.num_response_tokens])
            for row, values in zip(mine, found, strict=True)
        ]

    def _users(self, items: Sequence[ItemSummary], plan: BatchPlan) -> list[set[int]]:
        """The rows that each rank trains on."""
        samples, rows = rows_of_samples(items), count()
        places = [[next(rows) for _ in sample] for sample in samples]
        users: list[set[int]] = [set() for _ in range(plan.world_size)]
        for batch in chain.from_iterable(plan.passes(samples)):
            for rank, share in enumerate(plan.shares(samples, batch)):
                users[rank].update(row for index in share for row in places[index])
        return users

    def _holders(self, items: Sequence[ItemSummary], users: Sequence[set[int]]) -> list[list[int]]:
        """The rows from which each rank computes; every row once, unless each rank needs all of them."""
        ranks = range(len(users))
        if self.algorithm.needs == "episode":
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
