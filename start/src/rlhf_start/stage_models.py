"""Which option of the quickstart's run names the model of which stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.plugins.discovery import discover
from rlhf_core.plugins.selected import load
from rlhf_core.util.did_you_mean import fold

WARM_START = "warm-start"
"""Folder of the first stage, in the run folder of the last one."""


def stage_models(config: Any) -> dict[str, str]:
    """Stage of the quickstart -> the option of its run that names the stage's model; the folder is called as the stage.

    The warm start makes the policy; an algorithm declares further ones (`Component.stages`).
    """
    name = value_at(config, "algorithm.name")
    stages: Mapping[str, str] = {}
    if isinstance(name, str) and fold(name) in discover("algorithms"):
        stages = load("algorithms", name, check_requires=False).component.stages
    return {WARM_START: "model.path", **{stage: f"algorithm.{option}" for stage, option in stages.items()}}


def value_at(config: Any, key: str) -> Any:
    """The value at a dotted key; None where there is none."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config
