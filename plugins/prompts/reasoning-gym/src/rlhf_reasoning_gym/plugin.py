"""Components referenced by this distribution's entry points."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import ReasoningGymPrompts, ReasoningGymReward

_INSTALL = "pip install 'rlhf-reasoning-gym[reasoning-gym]'"

prompts = Component(
    summary="Generated problems of a Reasoning Gym task, scored by the reward of the same name.",
    config=ReasoningGymPrompts,
    build="rlhf_reasoning_gym.prompts:build",
    requires=("reasoning_gym",),
    install=_INSTALL,
)
reward = Component(
    summary="Score of the problem's Reasoning Gym verifier, 0 to 1.",
    config=ReasoningGymReward,
    build="rlhf_reasoning_gym.reward:build",
    requires=("reasoning_gym",),
    install=_INSTALL,
    isolate=True,
)
