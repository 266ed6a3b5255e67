"""Groups on their way from makers to trainers: opaque bytes, so that nobody in between needs torch or reads them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.rollout import group_from_tree, group_to_tree
from rlhf_core.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """A `RolloutGroup` of which only what the coordinator asks for is known."""

    position: int
    is_empty: bool
    body: bytes


def pack_group(group: RolloutGroup) -> PackedGroup:
    """Plain values, and arrays in place of tensors, which would be pickled one storage at a time."""
    import torch

    tree = _map_leaves(group_to_tree(group), torch.Tensor, lambda tensor: tensor.detach().cpu().numpy())
    return PackedGroup(group.position, group.is_empty, pickle.dumps(tree, protocol=pickle.HIGHEST_PROTOCOL))


def unpack_group(packed: PackedGroup) -> RolloutGroup:
    """The group again; its tensors own their memory."""
    import numpy as np
    import torch

    # From an actor of this run, over Ray, which pickles every message itself; nothing of it was ever a file.
    tree = pickle.loads(packed.body)  # noqa: S301
    return group_from_tree(_map_leaves(tree, np.ndarray, torch.from_numpy))


def _map_leaves(value: Any, kind: type, change: Any) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_leaves(inner, kind, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_map_leaves(inner, kind, change) for inner in value]
    return value
