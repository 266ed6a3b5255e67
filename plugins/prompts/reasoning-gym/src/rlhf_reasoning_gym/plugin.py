"""The components that this distribution's entry points name."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import ReasoningGymPrompts, ReasoningGymReward

_INSTALL = "pip install 'rlhf-reasoning-gym[reasoning-gym]'"

prompts = Component(
    summary="Problems of a task of Reasoning Gym, made by a program; judged by the reward of that name.",
    config=ReasoningGymPrompts,
    build="rlhf_reasoning_gym.prompts:build",
    requires=("reasoning_gym",),
    install=_INSTALL,
)
reward = Component(
    summary="0 to 1: the verifier of the problem's task of Reasoning Gym.",
    config=ReasoningGymReward,
    build="rlhf_reasoning_gym.reward:build",
    requires=("reasoning_gym",),
    install=_INSTALL,
    isolate=True,
)
