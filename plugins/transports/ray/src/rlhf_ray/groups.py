"""Converts groups to trees of plain values and tensors, for checkpoints (`util.save_tree`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

from rlhf_core import Column, Columns
from rlhf_core.types import BufferItem, Rollout, RolloutGroup, Turn


def group_to_tree(group: RolloutGroup) -> dict[str, Any]:
    """Convert a group to nested dicts, lists and tensors. Metadata must be JSON values."""
    return {
        "position": group.position,
        "rollouts": [_rollout_to_tree(rollout) for rollout in group.rollouts],
        "items": [_item_to_tree(item) for item in group.items],
    }


def group_from_tree(tree: Mapping[str, Any]) -> RolloutGroup:
    """Convert the result of `group_to_tree` back to a group."""
    return RolloutGroup(
        position=tree["position"],
        rollouts=tuple(_rollout_from_tree(each) for each in tree["rollouts"]),
        items=tuple(_item_from_tree(item) for item in tree["items"]),
    )


def with_groups(state: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Apply `change`, such as `group_to_tree`, to every group of a `RolloutCoordinator.state_dict()`.

    Example:
        >>> with_groups({"taken": 1, "open": {"1": {"accepted": ["a"]}}}, str.upper)
        {'taken': 1, 'open': {'1': {'accepted': ['A']}}}
    """
    opened = {
        index: {**saved, "accepted": [change(group) for group in saved["accepted"]]}
        for index, saved in state["open"].items()
    }
    return {**state, "open": opened}


def _rollout_to_tree(rollout: Rollout) -> dict[str, Any]:
    return {**_shallow(rollout), "turns": [turn.to_mapping() for turn in rollout.turns]}


def _rollout_from_tree(tree: Mapping[str, Any]) -> Rollout:
    return Rollout(**{**tree, "turns": tuple(Turn.from_mapping(turn) for turn in tree["turns"])})


def _item_to_tree(item: BufferItem) -> dict[str, Any]:
    kinds = item.columns.kinds
    return {
        **_shallow(item),
        "columns": {name: {**asdict(kinds[name]), "value": value} for name, value in item.columns.items()},
    }


def _item_from_tree(tree: Mapping[str, Any]) -> BufferItem:
    saved = {name: dict(column) for name, column in tree["columns"].items()}
    values = {name: column.pop("value") for name, column in saved.items()}
    kinds = {name: Column(**column) for name, column in saved.items()}
    return BufferItem(**{**tree, "columns": Columns(values, kinds)})


def _shallow(value: Rollout | BufferItem) -> dict[str, Any]:
    return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}


def _plain(value: Any) -> Any:
    return {key: _plain(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value
