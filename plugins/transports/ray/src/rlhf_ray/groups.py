"""Converts groups to trees of plain values and tensors, for checkpoints (`util.save_tree`) and the object store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

from rlhf_core import Column, Columns
from rlhf_core.types import BufferItem, Rollout, RolloutGroup, Turn


def group_to_tree(group: RolloutGroup) -> dict[str, Any]:
    """A group as nested dicts, lists and tensors. Metadata must be JSON values."""
    return {
        "position": group.position,
        "rollouts": [rollout_to_tree(rollout) for rollout in group.rollouts],
        "items": [item_to_tree(item) for item in group.items],
    }


def group_from_tree(tree: Mapping[str, Any]) -> RolloutGroup:
    """The group that `group_to_tree` wrote."""
    return RolloutGroup(
        position=tree["position"],
        rollouts=tuple(rollout_from_tree(each) for each in tree["rollouts"]),
        items=tuple(item_from_tree(item) for item in tree["items"]),
    )


def with_groups(state: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """`RolloutCoordinator.state_dict()` with `change` applied to every group: `group_to_tree`, `group_from_tree`."""
    opened = {
        index: {**saved, "accepted": [change(group) for group in saved["accepted"]]}
        for index, saved in state["open"].items()
    }
    return {**state, "open": opened}


def rollout_to_tree(rollout: Rollout) -> dict[str, Any]:
    """See `group_to_tree`."""
    return {**_shallow(rollout), "turns": [turn.to_mapping() for turn in rollout.turns]}


def rollout_from_tree(tree: Mapping[str, Any]) -> Rollout:
    """See `group_from_tree`."""
    return Rollout(**{**tree, "turns": tuple(Turn.from_mapping(turn) for turn in tree["turns"])})


def item_to_tree(item: BufferItem) -> dict[str, Any]:
    """See `group_to_tree`."""
    kinds = item.columns.kinds
    return {
        **_shallow(item),
        "columns": {name: {**asdict(kinds[name]), "value": value} for name, value in item.columns.items()},
    }


def item_from_tree(tree: Mapping[str, Any]) -> BufferItem:
    """See `group_from_tree`."""
    saved = {name: dict(column) for name, column in tree["columns"].items()}
    values = {name: column.pop("value") for name, column in saved.items()}
    kinds = {name: Column(**column) for name, column in saved.items()}
    return BufferItem(**{**tree, "columns": Columns(values, kinds)})


def plain(value: Any, change: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """A tree with its mappings as plain dicts, and everything else changed."""
    if isinstance(value, Mapping):
        return {key: plain(inner, change) for key, inner in value.items()}
    return change(value)


def _shallow(value: Rollout | BufferItem) -> dict[str, Any]:
    return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
