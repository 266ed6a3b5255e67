"""The entry point of the reward `model`."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import ModelRewardConfig

model = Component(
    summary="The score of a neural reward model: any transformers sequence-classification folder.",
    config=ModelRewardConfig,
    build="rlhf_reward_model.reward:build",
)
