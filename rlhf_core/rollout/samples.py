"""Converts played samples to rollouts for the rewards, items for the trainer, and episodes of items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..columns import ENGINE_COLUMNS, Column, Columns, check_owners
from ..config.load import OWN_REWARD
from ..errors import ConfigError, RlhfError
from ..rewards.values import TurnScores
from ..types import BufferItem, CollectedEpisode, ItemSummary, PhaseTimes, Rollout
from .episode_metrics import EPISODE_COLUMNS
from .row import Played, Row

if TYPE_CHECKING:
    from torch import Tensor

    from ..algorithm import Algorithm, GroupPass
    from ..config.resolve import ResolvedRun

GREEDY_REWARDS = "greedy_rewards"
"""Column: the rewards, by name, of the greedy answer to the sample's prompt."""
TURN_REWARDS = "turn_rewards"
"""Column [A, R]: the raw part of each of a sample's R `rewards` that a turn earned, at the turn's last token. Only with
an environment."""
GREEDY_COLUMNS: Mapping[str, Column] = {GREEDY_REWARDS: Column(per="metrics")}
"""Columns of an algorithm that `needs_greedy_answer`."""


def check_columns(
    resolved: ResolvedRun,
    algorithm: Algorithm[Any, Any],
    passes: Sequence[GroupPass] = (),
    of_prompts: Mapping[str, Column] | None = None,
) -> None:
    """Raise `ConfigError` if two parts of the run declare the same column, or the engine ignores model inputs."""
    engine = resolved.engine
    inputs = [name for name, column in (of_prompts or {}).items() if column.model_input]
    if inputs and resolved.generates and not engine.component.model_inputs:
        problem = f"the engine {engine.name} does not pass {', '.join(inputs)} to the model"
        raise ConfigError(problem, where="engine.name", hint="choose one that does: engine.name: hf")
    label = resolved.algorithm.label
    greedy = GREEDY_COLUMNS if getattr(algorithm, "needs_greedy_answer", False) else {}
    owners = [
        (label, {**algorithm.columns, **greedy}),
        (engine.label, engine.columns),
        (resolved.prompts.label, of_prompts or {}),
        ("core's sampling", ENGINE_COLUMNS),
        *resolved.row_columns,
    ]
    owners += [(f"the pass {type(e).__module__}.{type(e).__qualname__} of the {label}", e.columns) for e in passes]
    check_owners(owners)


def rollout_of(row: Row, sample: Played) -> Rollout:
    """Return one row of a sample as the rollout that rewards receive."""
    prompt, mask = sample.prompt, row.mask
    oldest = min(each.policy_version for _, each in row.sampled.values())  # including turns shared with another row
    versions = row.per_token(-1, lambda each: each.policy_versions or [each.policy_version] * len(each.token_ids))
    turns = list(row.turns)
    for number, place in row.own_turns.items():
        if reward := sample.turn_rewards.get(number, 0.0):
            turns[place] = replace(turns[place], reward=reward)
    return Rollout(
        sample_id=sample.sample_id,
        prompt=row.text,
        messages=row.messages,
        prompt_ids=row.prompt_ids,
        completion="\n".join(turn.text for turn in turns if turn.role == "policy"),
        completion_ids=tuple(row.ids),
        logprobs=tuple(row.logprobs),
        answer=prompt.answer,
        metadata=prompt.metadata,
        policy_version=oldest,
        finish_reason=row.finish_reason,
        action_mask=None if all(mask) else tuple(mask),
        group_id=prompt.position,
        branch=row.branch,
        turns=tuple(turns),
        policy_versions=tuple(versions) if set(versions) - {-1, oldest} else (),
    )


@dataclass(frozen=True, slots=True)
class SampleRewards:
    """The raw rewards of one sample."""

    scores: dict[str, float]
    """Reward name -> score. The environment's, if there is one, comes first."""
    turns: list[Mapping[int, float]]
    """For each of `scores`, the part earned in certain turns: number of the turn in the sample -> reward."""

    @classmethod
    def of(cls, sample: Played, rewards: Mapping[str, float]) -> SampleRewards:
        """Return the rewards of a sample. `rewards`: reward name -> score of its last row."""
        scores = {name: float(score) for name, score in rewards.items()}
        if sample.reward is None:
            return cls(scores, [{} for _ in scores])
        numbers = [number for number, _ in sample.rows[-1].sampled.values()]
        turns: list[Mapping[int, float]] = [
            {numbers[turn]: each for turn, each in score.turns.items()} if isinstance(score, TurnScores) else {}
            for score in rewards.values()
        ]
        return cls({OWN_REWARD: sample.reward, **scores}, [sample.turn_rewards, *turns])


def item_of(
    row: Row,
    rollout: Rollout,
    rewards: SampleRewards,
    sample: Played,
    kl_coef: float | None,
    greedy_rewards: Mapping[str, float] | None = None,
) -> BufferItem:
    """Return one row of a sample as an item for the trainer."""
    import torch

    columns = sample.prompt.columns | row.columns | _engine_columns(row)
    if greedy_rewards is not None:
        columns |= Columns({GREEDY_REWARDS: greedy_rewards}, GREEDY_COLUMNS)
    if sample.reward is not None:
        columns |= Columns({TURN_REWARDS: _turn_rewards(row, rewards.turns)}, EPISODE_COLUMNS)
    return BufferItem(
        sample_id=rollout.sample_id,
        group_id=rollout.group_id,
        policy_version=rollout.policy_version,
        prompt_ids=torch.tensor(rollout.prompt_ids, dtype=torch.int64),
        response_ids=torch.tensor(rollout.completion_ids, dtype=torch.int64),
        action_mask=torch.tensor(row.mask, dtype=torch.bool),
        action_log_probs=torch.tensor(rollout.logprobs, dtype=torch.float32),
        rewards=rewards.scores,
        support_ids=_support_tensor(row),
        truncated=rollout.finish_reason == "length",
        kl_coef=kl_coef,
        branch=row.branch,
        policy_versions=torch.tensor(rollout.policy_versions, dtype=torch.int32) if rollout.policy_versions else None,
        columns=columns,
    )


def _engine_columns(row: Row) -> Columns:
    """Return the engine's columns of a row's sampled turns: `fill` for other tokens, per sample the last value."""
    merged = Columns()
    ends = list(accumulate(len(turn.token_ids) for turn in row.turns))
    for place, completion in row.own_completions.items():
        columns = completion.columns if isinstance(completion.columns, Columns) else Columns()
        for name, value in columns.items():
            if columns.kinds[name].per == "token":
                earlier, fill = merged.get(name, value[:0]), columns.kinds[name].fill
                sizes = [max(each) for each in zip(earlier.shape, value.shape, strict=True)]
                whole = value.new_full((ends[-1], *sizes[1:]), fill)
                whole[tuple(map(slice, earlier.shape))] = earlier
                whole[(slice(ends[place] - len(value), ends[place]), *map(slice, value.shape[1:]))] = value
                columns |= Columns({name: whole}, columns.kinds)
        merged |= columns
    return merged


def _turn_rewards(row: Row, turns: Sequence[Mapping[int, float]]) -> Tensor:
    """[A, R] float32: each reward's part for each turn sampled in this row, at the turn's last token."""
    import torch

    rewards = torch.zeros(len(row.ids), len(turns), dtype=torch.float32)
    for number, end in row.turn_ends.items():
        rewards[end] = torch.tensor([each.get(number, 0.0) for each in turns])
    return rewards


def _support_tensor(row: Row) -> Tensor | None:
    """[A, K] int32, padded with -1, or None if every token was sampled from the whole vocabulary."""
    import torch

    none: Sequence[int] = ()
    support = row.per_token(none, lambda each: each.support_ids or [none] * len(each.token_ids))
    if not (width := max(map(len, support))):
        return None
    table = torch.full((len(support), width), -1, dtype=torch.int32)
    for token, ids in enumerate(support):
        table[token, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return table


class SamplesLost(RlhfError):
    """Samples of an episode were lost before training on them, and must be sampled again."""


def collected_episode(
    items: Iterable[BufferItem],
    times: PhaseTimes,
    *,
    rollouts: Iterable[Rollout] = (),
    metrics: Mapping[str, float] | None = None,
) -> CollectedEpisode:
    """Return an episode whose samples this process holds.

    Args:
        items: Items of all samples, in any order.
        times: Phase times of this process's makers.
        rollouts: Rollouts of the items, in any order. Empty if texts are not kept.
        metrics: The channel's metrics of the episode.

    Returns:
        The episode, with rows sorted by `sample_id` and `branch`.
    """
    data = _LocalData(items, rollouts)
    return CollectedEpisode(
        rows=[ItemSummary.of(item) for item in data.items], data=data, times=times, metrics=metrics or {}
    )


class _LocalData:
    """`EpisodeData` in this process."""

    def __init__(self, items: Iterable[BufferItem], rollouts: Iterable[Rollout]) -> None:
        self.items = sorted(items, key=lambda item: (item.sample_id, item.branch))
        self._rollouts = {(rollout.sample_id, rollout.branch): rollout for rollout in rollouts}

    def load(self, rows: Sequence[int], texts: Sequence[int]) -> tuple[list[BufferItem], list[Rollout]]:
        shown = [self.items[row] for row in texts]
        return [self.items[row] for row in rows], [self._rollouts[item.sample_id, item.branch] for item in shown]
