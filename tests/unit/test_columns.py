"""Columns are carried bit for bit by all that handles samples, and wrong ones are named."""

from __future__ import annotations

import pickle
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_columns import assert_same_columns, columns_of, with_columns
from hypothesis import given, settings

from rlhf_core.algorithm import GroupPass
from rlhf_core.batching import collate, split, to_device
from rlhf_core.columns import Column, Columns, check_owners
from rlhf_core.config.resolve import resolve
from rlhf_core.entry.train import check_run
from rlhf_core.errors import ConfigError, PluginError
from rlhf_core.rewards.scorer import RewardCombiner
from rlhf_core.rollout import RolloutCoordinator, collected_episode
from rlhf_core.training.batches import BatchPlan
from rlhf_core.training.estimates import EpisodeEstimator
from rlhf_core.types import BufferItem, Experience, PhaseTimes, RolloutGroup
from rlhf_core.util.tensor_files import load_tree, save_tree
from rlhf_ray.groups import group_from_tree, group_to_tree, with_groups
from rlhf_testing.runs import tiny_run
from rlhf_testing.samples import make_item
from rlhf_testing.thread_ranks import Ranks

GAME: dict[str, Any] = {"environment": {"name": "guess-number"}, "prompts": None, "rewards": None}


@given(columns_of())
@settings(max_examples=40, deadline=None)
def test_batches_keep_them(items: list[BufferItem]) -> None:
    batch = collate(items)
    for one, other in zip(items, split(batch), strict=True):
        assert_same_columns(one, other)
    moved = to_device(replace(batch, columns=batch.columns), torch.device("cpu"))
    for one, other in zip(items, split(moved), strict=True):
        assert_same_columns(one, pickle.loads(pickle.dumps(other)))


@given(columns_of())
def test_padding_is_the_fill(items: list[BufferItem]) -> None:
    batch = collate(items)
    for name, kind in batch.columns.kinds.items():
        if kind.per == "token":
            for row, item in enumerate(items):
                assert (batch.columns[name][row, item.num_response_tokens :] == kind.fill).all()


@given(columns_of())
@settings(max_examples=25)
def test_a_coordinator_resumes_with_them(items: list[BufferItem]) -> None:
    coordinator: RolloutCoordinator[RolloutGroup] = RolloutCoordinator(
        num_episodes=2, prompts_per_episode=3, max_staleness=1
    )
    assert len(coordinator.lease(2)) == 2
    for position in (0, 1):
        own = tuple(item for item in items if item.group_id == position)
        assert coordinator.submit(RolloutGroup(position=position, rollouts=(), items=own))
    with tempfile.TemporaryDirectory() as folder:
        save_tree(Path(folder) / "state", with_groups(coordinator.state_dict(), group_to_tree))
        back = with_groups(load_tree(Path(folder) / "state"), group_from_tree)
    (opened,) = back["open"].values()
    found = [item for group in opened["accepted"] for item in group.items]
    assert len(found) == 4
    for one, other in zip(items, found, strict=False):
        assert_same_columns(one, other)


class Adds:
    """An algorithm that adds a column and replaces none."""

    def __init__(self, needs: str) -> None:
        self.needs_all_rows = needs == "episode"

    def advantages(self, episode: Any) -> Experience:
        kinds = {"added": Column(dtype="int16", fill=7)}
        added = Columns({"added": episode.sample_ids[:, None].expand(episode.action_mask.shape)}, kinds)
        zeros = torch.zeros(episode.action_mask.shape)
        return replace(episode, advantages=zeros, columns=episode.columns | added)

    def masked(self, item: BufferItem) -> BufferItem:
        return replace(item, action_mask=torch.zeros_like(item.action_mask))


@pytest.mark.parametrize("needs", ["row", "episode"])
@given(items=columns_of())
@settings(max_examples=15)
def test_ranks_share_them(needs: str, items: list[BufferItem]) -> None:
    algorithm: Any = Adds(needs)
    combiner = RewardCombiner(dict.fromkeys(items[0].rewards, 1.0))

    def work(rank: int, strategy: Any) -> list[BufferItem]:
        estimates = EpisodeEstimator(algorithm, combiner, strategy, BatchPlan(5, 1, rank, 2))
        return list(estimates.of(collected_episode(items, PhaseTimes()), 0).items)

    found = [item for rank in Ranks(2).run(work) for item in rank]
    assert sorted(item.sample_id for item in found) == list(range(5))
    for item in found:
        given, added = items[item.sample_id], item.columns["added"]
        assert added.tolist() == [item.sample_id] * item.num_response_tokens and added.dtype == torch.int16
        assert_same_columns(given, with_columns(item, item.columns.only(lambda name, _: name != "added")))


def test_a_column_that_some_samples_lack_is_named() -> None:
    have = with_columns(make_item(0), Columns({"novelty": torch.zeros(4)}, {"novelty": Column()}))
    with pytest.raises(ValueError, match=r"column 'novelty' is set for some samples .* missing for \[1\]"):
        collate([have, make_item(1)])


def test_a_value_of_another_length_is_named() -> None:
    wrong = with_columns(make_item(3), Columns({"novelty": torch.zeros(5)}, {"novelty": Column()}))
    with pytest.raises(ValueError, match=r"'novelty', per token, has the shape \[5\] for sample 3 of 4 response"):
        collate([wrong])


def test_values_of_unequal_inner_sizes_are_padded() -> None:
    kind = {"banned": Column(dtype="int32", fill=-1, optional=True)}
    two = with_columns(make_item(0), Columns({"banned": torch.ones(4, 2)}, kind))
    three = with_columns(make_item(1), Columns({"banned": torch.ones(4, 3)}, kind))
    banned = collate([two, three, make_item(2)]).columns["banned"]
    assert banned.shape == (3, 4, 3) and banned.dtype == torch.int32
    assert banned[0, 0].tolist() == [1, 1, -1] and banned[1, 0].tolist() == [1, 1, 1] and (banned[2] == -1).all()


def test_a_kind_that_is_not() -> None:
    with pytest.raises(PluginError, match=r"(?s)a column's dtype is 'float12'.*use float64"):
        Column(dtype="float12")  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="a column's per is 'batch'"):
        Column(per="batch")  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="no column 'novel' is declared"):
        Columns({"novel": [1.0]}, {"novelty": Column()})


def test_two_owners_of_one_name() -> None:
    column = {"novelty": Column()}
    check_owners([("algorithm a", column), ("engine b", {})])
    with pytest.raises(ConfigError, match="algorithm a and engine b both declare a column 'novelty'"):
        check_owners([("algorithm a", column), ("engine b", column)])
    with pytest.raises(ConfigError, match="pass acme.P and pass acme.P both declare a column 'novelty'"):
        check_owners([("pass acme.P", column)] * 2)


def test_values_get_the_type_that_is_declared() -> None:
    columns = Columns({"level": 3, "told": {"a": 1}}, {"level": Column("prompt", "int8"), "told": Column("metrics")})
    assert columns["level"].dtype == torch.int8 and columns["told"] == {"a": 1.0}
    assert isinstance(columns["told"]["a"], float)
    changed = columns | Columns({"told": {}}, {"told": Column("metrics")})
    assert (dict(changed["told"]), dict(columns["told"])) == ({}, {"a": 1.0})


@pytest.mark.parametrize(
    ("column", "changes", "owner"),
    [
        ("environment", GAME, 'section "environment" (rlhf-episodes'),
        ("turn_rewards", GAME, 'section "environment" (rlhf-episodes'),
        ("seen", GAME, 'environment "guess-number" (rlhf-environments'),
        ("temperature", {}, "core's sampling"),
        ("score", {}, 'engine "hf" (rlhf-hf'),
    ],
)
def test_a_run_with_two_owners_is_refused_before_it_starts(
    column: str, changes: dict[str, Any], owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 2 of `rlhf train`, with `--dry-run` or not, before there is a run folder."""
    monkeypatch.setattr("rlhf_ppo.algorithm.PPO.columns", {column: Column()}, raising=False)
    monkeypatch.setattr("rlhf_hf.config.HfEngineConfig.columns", {"score": Column()}, raising=False)
    resolved = resolve(tiny_run(changes))
    if "environment" in resolved.sections:
        monkeypatch.setattr(
            resolved.sections["environment"].component.config, "columns", {"seen": Column()}, raising=False
        )
    with pytest.raises(ConfigError) as found:
        check_run(resolved)
    message = str(found.value)
    assert 'algorithm "ppo" (rlhf-' in message and owner in message and f"both declare a column {column!r}" in message


def test_the_rewards_of_greedy_answers_are_a_column_of_the_algorithm_that_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlhf_hf.config.HfEngineConfig.columns", {"greedy_rewards": Column()})
    check_run(resolve(tiny_run()))
    monkeypatch.setattr("rlhf_ppo.algorithm.PPO.needs_greedy_answer", True)
    with pytest.raises(ConfigError, match=r"algorithm .*ppo.* and engine .*hf.* declare a column 'greedy_rewards'"):
        check_run(resolve(tiny_run()))


class Reads(GroupPass):
    """Reads its model too early."""

    def __init__(self, context: Any) -> None:
        self.model = context.models["witness"]

    def run(self, groups: Any) -> Any: ...


def test_a_pass_reads_its_model_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_ppo.algorithm.PPO.passes", lambda self, context: [Reads(context)])
    with pytest.raises(PluginError, match=r"(?s)reads `context.models` in its constructor.*algorithm \"ppo\""):
        check_run(resolve(tiny_run()))
