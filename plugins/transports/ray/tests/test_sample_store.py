"""Samples in the object store: what arrives, where it is, and what happens when it is lost."""

from __future__ import annotations

import gc
import pickle
from dataclasses import replace
from typing import Any

import pytest
import ray
import torch
from drawn_columns import assert_same_columns, columns_of
from hypothesis import given, settings
from hypothesis import strategies as st
from running import PATIENCE_SECONDS

from rlhf_core.columns import Column, Columns
from rlhf_core.rollout import SamplesLost
from rlhf_core.types import BufferItem, ItemSummary, Rollout, RolloutGroup
from rlhf_ray import sample_store
from rlhf_ray.calls import wait_until
from rlhf_ray.groups import group_to_tree
from rlhf_ray.sample_store import (
    StoredEpisode,
    fetch,
    fetch_groups,
    gc_paused,
    store_groups,
    summaries,
)

pytestmark = pytest.mark.usefixtures("local_ray")

WAIT = PATIENCE_SECONDS


def group(position: int) -> RolloutGroup:
    rollout = Rollout(
        sample_id=position,
        prompt="3,1>",
        messages=None,
        prompt_ids=(7, 5),
        completion="1,3",
        completion_ids=(5, 6, 7),
        logprobs=(-0.5, -0.25, 0.0),
        answer="1,3",
        metadata={"digits": [3, 1]},
        policy_version=4,
        finish_reason="stop",
        group_id=position,
    )
    item = BufferItem(
        sample_id=position,
        group_id=position,
        policy_version=4,
        prompt_ids=torch.tensor([7, 5]),
        response_ids=torch.tensor([5, 6, 7]),
        action_mask=torch.tensor([True, True, False]),
        action_log_probs=torch.tensor([-0.5, -0.25, 0.0]),
        rewards={"exact": 1.0},
        columns=Columns(
            {"greedy": {"exact": 0.5}, "turns": torch.tensor([[0.0], [1.0], [0.0]]), "level": 3},
            {"greedy": Column("metrics"), "turns": Column(), "level": Column("prompt", "int8")},
        ),
        values=torch.tensor([0.1, 0.2, 0.3]),
        support_ids=torch.tensor([[5, -1], [6, 7], [7, -1]], dtype=torch.int32),
    )
    return RolloutGroup(position=position, rollouts=(rollout,), items=(item,))


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, Columns):
        assert left.kinds == right.kinds
        assert_same(dict(left), dict(right))
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list):
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


def groups() -> list[RolloutGroup]:
    """Groups of no, one and three rows, with branches; some rows lack what others have."""
    made = []
    for position, size in enumerate([3, 0, 1, 3]):
        (item,), (rollout,) = group(position).items, group(position).rollouts
        items = [replace(item, sample_id=10 * position + k, rewards={"exact": float(k)}) for k in range(size)]
        if size == 3:
            items[1] = replace(items[1], support_ids=None, values=None, truncated=True, kl_coef=0.5, columns=Columns())
            items[2] = replace(items[2], sample_id=items[1].sample_id, branch=1, response_ids=torch.arange(900))
        rollouts = [replace(rollout, sample_id=each.sample_id, branch=each.branch) for each in items]
        made.append(RolloutGroup(position=position, rollouts=tuple(rollouts), items=tuple(items)))
    return made


@pytest.mark.parametrize("object_bytes", [1, 200, 1 << 20])
def test_groups_arrive_as_they_were_sent(object_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_store, "_OBJECT_BYTES", object_bytes)
    sent = groups()
    stored = store_groups(sent, "maker-0", texts=True)
    assert [summaries(each) for each in stored] == [[ItemSummary.of(item) for item in each.items] for each in sent]
    arrived, lost = fetch_groups(stored, timeout_seconds=WAIT)
    assert not lost
    for one, other in zip(arrived, sent, strict=True):
        assert_same(group_to_tree(one), group_to_tree(other))
        for item in one.items:
            item.response_ids.add_(1)  # its memory is its own
    assert_same(group_to_tree(fetch_groups(stored, timeout_seconds=WAIT)[0][0]), group_to_tree(sent[0]))


def test_a_rank_gets_only_the_rows_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_store, "_OBJECT_BYTES", 1)
    sent = groups()
    stored = store_groups(sent, "maker-0", texts=False)
    asked: list[Any] = []
    get = ray.get
    monkeypatch.setattr(sample_store.ray, "get", lambda ref, timeout: asked.append(ref) or get(ref, timeout=timeout))
    episode = StoredEpisode(stored, Two(), give_back=lambda _: None, timeout_seconds=WAIT)  # type: ignore[arg-type]
    items, _ = episode.load([6, 0], [])
    assert len(asked) == 2
    assert_same(vars_of(items[0]), vars_of(sent[3].items[2]))
    assert_same(vars_of(items[1]), vars_of(sent[0].items[0]))
    assert not any(each.texts for each in stored)


@given(columns_of(), st.integers(1, 400))
@settings(max_examples=15, deadline=None)
def test_columns_are_the_same_from_the_object_store(items: list[BufferItem], object_bytes: int) -> None:
    """Whole groups, and one row of an object that holds rows of several."""
    of = [tuple(each for each in items if each.group_id == position) for position in range(3)]
    groups = [RolloutGroup(position=position, rollouts=(), items=own) for position, own in enumerate(of)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_store, "_OBJECT_BYTES", object_bytes)
        stored = store_groups(groups, "maker-0", texts=False)
    found, lost = fetch_groups(stored, timeout_seconds=WAIT)
    assert not lost and [group.position for group in found] == [0, 1, 2]
    for one, other in zip(items, [item for group in found for item in group.items], strict=True):
        assert_same_columns(one, other)
    place = stored[1].items[1]
    assert_same_columns(items[3], fetch([place], timeout_seconds=WAIT)[place])


def test_inputs_of_a_prompt_are_packed_once_for_its_group() -> None:
    kinds = {"pixels": Column(per="prompt", dtype="uint8", model_input=True)}
    sent = []
    for made in groups():
        pixels = torch.full((50_000,), made.position, dtype=torch.uint8)
        columns = Columns({"pixels": pixels}, kinds)
        items = tuple(replace(item, columns=item.columns | columns) for item in made.items)
        sent.append(replace(made, items=items))
    stored = store_groups(sent, "maker-0", texts=False)
    assert [50_000 < each.token_bytes < 60_000 for each in stored] == [True, False, True, True]
    arrived, lost = fetch_groups(stored, timeout_seconds=WAIT)
    assert not lost
    for one, other in zip(arrived, sent, strict=True):
        assert len({item.columns["pixels"].data_ptr() for item in one.items}) == min(1, len(one.items))
        for ours, theirs in zip(one.items, other.items, strict=True):
            assert_same(vars_of(replace(ours, columns=Columns())), vars_of(replace(theirs, columns=Columns())))
            assert torch.equal(ours.columns["pixels"], theirs.columns["pixels"])
    place = stored[3].items[2]
    assert fetch([place], timeout_seconds=WAIT)[place].sample_id == sent[3].items[2].sample_id


def vars_of(item: BufferItem) -> dict[str, Any]:
    return {name: getattr(item, name) for name in BufferItem.__slots__}


def test_what_a_coordinator_handles_is_small() -> None:
    items = [replace(each, rewards={"accuracy": 0.5, "format": 1.0}) for each in group(7).items * 16]
    big = [replace(item, sample_id=k, response_ids=torch.zeros(20_000)) for k, item in enumerate(items)]
    (stored,) = store_groups([RolloutGroup(position=7, rollouts=(), items=tuple(big))], "maker-0", texts=False)
    assert stored.token_bytes > 16 * 80_000
    assert len(pickle.dumps(replace(stored, items=()))) < 16 * 128


def test_collections_are_off_while_objects_are_made_and_then_as_they_were() -> None:
    with pytest.raises(ValueError, match="in between"), gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the inner one found them off"
        raise ValueError("in between")
    assert gc.isenabled()


class Two:
    """A strategy whose other rank lost nothing."""

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        return tensor

    def run_on_main(self, work: Any) -> None:
        work()


@ray.remote(num_cpus=0)
class Owner:
    def store(self, sent: list[RolloutGroup]) -> Any:
        return store_groups(sent, "maker-9", texts=True)


@pytest.mark.slow
def test_what_went_with_its_maker_is_lost_on_every_rank() -> None:
    sent = groups()
    owner = Owner.remote()
    made = ray.get(owner.store.remote(sent[:1]), timeout=WAIT)
    stored = [*made, *store_groups(sent[1:], "maker-0", texts=True)]
    given_back: list[list[int]] = []
    episode = StoredEpisode(stored, Two(), give_back=given_back.append, timeout_seconds=WAIT)  # type: ignore[arg-type]
    assert [row.sample_id for row in episode.rows] == [0, 1, 1, 20, 30, 31, 31]
    items, rollouts = episode.load([6, 3], [6])
    assert [(item.sample_id, item.branch) for item in items] == [(31, 1), (20, 0)]
    assert [(rollout.sample_id, rollout.branch) for rollout in rollouts] == [(31, 1)]

    ray.kill(owner)
    items, _ = episode.load([3, 4], [3])
    assert [item.sample_id for item in items] == [20, 30]
    assert wait_until(lambda: not fetch(stored[0].items[:1], timeout_seconds=WAIT), WAIT)  # Ray has to notice
    with pytest.raises(SamplesLost, match="samples of 1 prompts were lost with their process"):
        episode.load([0, 3], [])
    with pytest.raises(SamplesLost):
        episode.load([3], [0])
    assert given_back == [[0], [0]]
    whole, lost = fetch_groups(stored, timeout_seconds=WAIT)
    assert [each.position for each in whole] == [1, 2, 3]
    assert [each.position for each in lost] == [0]


def test_a_row_brings_no_neighbour_into_the_ranks_memory() -> None:
    """Three rows of a group lie in one object; a rank that wants one of them holds that one."""
    (stored,) = store_groups(groups()[3:], "m", texts=False)
    assert len({ref for ref, _, _ in stored.items}) == 1
    (item,) = fetch(stored.items[:1], timeout_seconds=WAIT).values()
    tensors = [value for value in vars_of(item).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 5
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
