"""The entry point of the reward `judge`."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import JudgeConfig

judge = Component(
    summary="A language model judges answers by a rubric, each alone or against others to the same prompt.",
    config=JudgeConfig,
    build="rlhf_reward_judge.judge:build",
)
