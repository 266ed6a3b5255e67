"""Converts groups to trees of plain values and tensors, for checkpoints (`util.save_tree`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ..types import BufferItem, Rollout, RolloutGroup, Turn


def group_to_tree(group: RolloutGroup) -> dict[str, Any]:
    """A group as nested dicts, lists and tensors. Metadata must be JSON values."""
    return {
        "position": group.position,
        "rollouts": [
            {**_shallow(rollout), "turns": [turn.to_mapping() for turn in rollout.turns]} for rollout in group.rollouts
        ],
        "items": [_shallow(item) for item in group.items],
    }


def group_from_tree(tree: Mapping[str, Any]) -> RolloutGroup:
    """The group that `group_to_tree` wrote."""
    return RolloutGroup(
        position=tree["position"],
        rollouts=tuple(
            # Checkpoints before API 2 have no turns.
            Rollout(**{**each, "turns": tuple(Turn.from_mapping(turn) for turn in each.get("turns", ()))})
            for each in tree["rollouts"]
        ),
        items=tuple(BufferItem(**_with_turn_rewards(item)) for item in tree["items"]),
    )


def coordinator_to_tree(state: Mapping[str, Any]) -> dict[str, Any]:
    """`RolloutCoordinator.state_dict()` with its groups as trees."""
    return with_groups(state, group_to_tree)


def coordinator_from_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The state that `coordinator_to_tree` wrote."""
    return with_groups(tree, group_from_tree)


def with_groups(state: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A coordinator's state with `change` applied to every group."""
    opened = {
        index: {**saved, "accepted": [change(group) for group in saved["accepted"]]}
        for index, saved in state["open"].items()
    }
    return {**state, "open": opened}


def _with_turn_rewards(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Checkpoints of earlier versions have one number a token: the environment's, which is the first reward."""
    turns = item.get("turn_rewards")
    if turns is None or turns.dim() == 2:
        return item
    import torch

    return {**item, "turn_rewards": torch.nn.functional.pad(turns.unsqueeze(-1), (0, len(item["rewards"]) - 1))}


def _shallow(value: Rollout | BufferItem) -> dict[str, Any]:
    return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return value
