"""The entry point of the reward `judge`."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import JudgeConfig

judge = Component(
    summary="A language model judges: by a rubric, or answers to one prompt against each other.",
    config=JudgeConfig,
    build="rlhf_reward_judge.judge:build",
)
