"""The options of the quickstart's run that name the models of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.plugins.discovery import discover
from rlhf_core.plugins.selected import load
from rlhf_core.util.did_you_mean import fold

WARM_START = "warm-start"
"""Folder of the first stage, in the run folder of the last one."""


def stage_models(config: Any) -> dict[str, str]:
    """Return stage (also the name of its folder) -> dotted option of the run that names the stage's model.

    The warm start makes the policy. An algorithm declares other stages (`Component.stages`).
    """
    name = value_at(config, "algorithm.name")
    stages: Mapping[str, str] = {}
    if isinstance(name, str) and fold(name) in discover("algorithms"):
        stages = load("algorithms", name, check_requires=False).component.stages
    return {WARM_START: "model.path", **{stage: f"algorithm.{option}" for stage, option in stages.items()}}


def value_at(config: Any, key: str) -> Any:
    """Return the value at a dotted key, or None.

    Example:
        >>> value_at({"model": {"path": "my-model"}}, "model.path"), value_at({}, "model.path")
        ('my-model', None)
    """
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config
