"""Validates records of run folders, which are untrusted: drops values of a wrong type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_MAX_NUMBER = 1e100
"""Larger numbers are not measurements and cannot be plotted or summed."""
_MAX_INDEX = 2**53
_INDICES = ("sample_id", "episode", "policy_version", "num_tokens", "branch", "step")


def is_number(value: Any) -> bool:
    """Whether a value is a finite number of usable size."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _MAX_NUMBER and math.isfinite(value)


def known_line(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the numbers of a line of `metrics.jsonl`, or None if the line lacks a step.

    Args:
        record: the parsed line.

    Example:
        >>> known_line({"step": 3, "loss": 0.5, "note": "text", "kl": float("nan")})
        {'step': 3, 'loss': 0.5}
        >>> known_line({"loss": 0.5}) is None
        True
    """
    if not _is_index(record.get("step")):
        return None
    return {key: value for key, value in record.items() if is_number(value)}


def known_sample(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a line of `samples.jsonl` without values of a wrong type, or None if it lacks a completion.

    Args:
        record: the parsed line.

    Example:
        >>> known_sample({"completion": "yes", "score": "high", "rewards": {"length": 1.0, "match": None}})
        {'completion': 'yes', 'rewards': {'length': 1.0}}
    """
    if not isinstance(record.get("completion"), str):
        return None
    sample = {key: value for key, value in record.items() if key not in _INDICES or _is_index(value)}
    rewards = sample.get("rewards")
    if "rewards" in sample:
        sample["rewards"] = (
            {name: value for name, value in rewards.items() if is_number(value)} if isinstance(rewards, Mapping) else {}
        )
    if not is_number(sample.get("score")):
        sample.pop("score", None)
    for key in ("prompt", "finish_reason"):
        if not isinstance(sample.get(key), str):
            sample.pop(key, None)
    if not _are_mappings(sample.get("turns")):
        sample.pop("turns", None)
    for turn in sample.get("turns", ()):
        if not _are_mappings(turn.get("tool_calls")):
            turn.pop("tool_calls", None)
    return known_values(sample)


def _are_mappings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, dict) for each in values)


def known_values(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a record with None in place of invalid numbers, nested ones included.

    Args:
        record: values of JSON.

    Example:
        >>> known_values({"reward": float("inf"), "steps": [1, float("nan")]})
        {'reward': None, 'steps': [1, None]}
    """
    return {key: _replace_invalid(value) for key, value in record.items()}


def _replace_invalid(value: Any) -> Any:
    if isinstance(value, Mapping):
        return known_values(value)
    if isinstance(value, list):
        return [_replace_invalid(each) for each in value]
    is_invalid = isinstance(value, int | float) and not isinstance(value, bool) and not is_number(value)
    return None if is_invalid else value


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_INDEX
