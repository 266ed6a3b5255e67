"""Groups survive a file."""

import dataclasses

import pytest
import torch

from rlhf_core.columns import Column, Columns
from rlhf_core.types import RolloutGroup
from rlhf_core.util.tensor_files import load_tree, save_tree
from rlhf_ray.groups import group_from_tree, group_to_tree
from rlhf_testing.samples import make_group

KINDS = {"greedy": Column(per="metrics"), "turns": Column()}


def full_group():
    group = make_group(3, 2, policy_version=5)
    items = tuple(
        dataclasses.replace(
            item,
            reference_log_probs=torch.rand(4),
            values=torch.rand(4),
            support_ids=torch.tensor([[1, 2], [3, -1], [4, 5], [6, -1]], dtype=torch.int32),
            kl_coef=0.5,
            truncated=True,
            columns=Columns({"greedy": {"score": 0.5}, "turns": torch.rand(4, 1)}, KINDS),
            policy_versions=torch.tensor([4, -1, 5, 5], dtype=torch.int32),
        )
        for item in group.items
    )
    rollouts = tuple(
        dataclasses.replace(
            rollout,
            messages=({"role": "user", "content": "1", "parts": [{"a": None}]},),
            metadata={"level": 3, "tags": ["x", {"y": 1.5}], "nothing": None, "$odd": True},
            answer={"all": ["13", 13]},
            action_mask=(True, False, True, True),
            policy_versions=(4, -1, 5, 5),
        )
        for rollout in group.rollouts
    )
    return RolloutGroup(position=3, items=items, rollouts=rollouts)


@pytest.mark.parametrize("group", [make_group(0), full_group(), RolloutGroup(position=9, rollouts=(), items=())])
def test_a_group_comes_back_as_it_was(tmp_path, group):
    save_tree(tmp_path / "groups.safetensors", {"groups": [group_to_tree(group)]})
    back = group_from_tree(load_tree(tmp_path / "groups.safetensors")["groups"][0])
    assert back.position == group.position
    assert back.rollouts == group.rollouts
    for ours, theirs in zip(back.items, group.items, strict=True):
        for field in dataclasses.fields(theirs):
            same(getattr(ours, field.name), getattr(theirs, field.name))


def same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, Columns):
        assert ours.kinds == theirs.kinds
        for name in theirs:
            same(ours[name], theirs[name])
    else:
        assert ours == theirs
        assert type(ours) is type(theirs)
