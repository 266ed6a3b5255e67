"""Validates records of run folders, which are untrusted: values of a wrong type are left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_LARGEST = 1e100
"""Larger numbers are not measurements, and cannot be plotted or summed."""
_LARGEST_INDEX = 2**53
_INDICES = ("sample_id", "episode", "policy_version", "num_tokens", "branch", "step")


def is_number(value: Any) -> bool:
    """Whether this is a finite number of usable size."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _LARGEST and math.isfinite(value)


def known_line(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The numbers of a line of `metrics.jsonl`; None for one without a step."""
    if not _is_index(record.get("step")):
        return None
    return {key: value for key, value in record.items() if is_number(value)}


def known_sample(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """A line of `samples.jsonl` without values of a wrong type; None for one without a completion."""
    if not isinstance(record.get("completion"), str):
        return None
    found = {key: value for key, value in record.items() if key not in _INDICES or _is_index(value)}
    rewards = found.get("rewards")
    if "rewards" in found:
        found["rewards"] = (
            {name: value for name, value in rewards.items() if is_number(value)} if isinstance(rewards, Mapping) else {}
        )
    if not is_number(found.get("score")):
        found.pop("score", None)
    for key in ("prompt", "finish_reason"):
        if not isinstance(found.get(key), str):
            found.pop(key, None)
    if not _are_mappings(found.get("turns")):
        found.pop("turns", None)
    for turn in found.get("turns", ()):
        if not _are_mappings(turn.get("tool_calls")):
            turn.pop("tool_calls", None)
    return known_values(found)


def _are_mappings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, dict) for each in values)


def known_values(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with invalid numbers replaced by None."""
    return {key: _known(value) for key, value in record.items()}


def _known(value: Any) -> Any:
    if isinstance(value, Mapping):
        return known_values(value)
    if isinstance(value, list):
        return [_known(each) for each in value]
    is_wrong = isinstance(value, int | float) and not isinstance(value, bool) and not is_number(value)
    return None if is_wrong else value


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST_INDEX
