"""The entry points of the critic-free algorithms."""

from __future__ import annotations

from rlhf_core import Component

from .config import GRPOConfig, ReinforceConfig, RLOOConfig

grpo = Component(
    summary="GRPO: a clipped policy loss on rewards normalised within the answers to one prompt; no critic.",
    config=GRPOConfig,
    build="rlhf_group.critic_free:build",
)
rloo = Component(
    summary="RLOO: the baseline of an answer is the mean reward of the others to its prompt; no critic.",
    config=RLOOConfig,
    build="rlhf_group.critic_free:build",
)
reinforce_plus_plus = Component(
    summary="REINFORCE++: rewards-to-go with the KL in the reward, whitened over the whole episode; no critic.",
    config=ReinforceConfig,
    build="rlhf_group.critic_free:build",
)
