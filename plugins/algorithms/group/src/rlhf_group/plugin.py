"""Entry points of the critic-free algorithms."""

from __future__ import annotations

from rlhf_core import Component

from .config import GRPOConfig, OnlineDPOConfig, ReinforceConfig, RejectionSamplingConfig, RLOOConfig

grpo = Component(
    summary="GRPO: a clipped policy loss on rewards normalized over the answers to each prompt, without a critic.",
    config=GRPOConfig,
    build="rlhf_group.critic_free:build",
)
rloo = Component(
    summary="RLOO: the baseline of an answer is the mean reward of the other answers to its prompt, without a critic.",
    config=RLOOConfig,
    build="rlhf_group.critic_free:build",
)
reinforce_plus_plus = Component(
    summary="REINFORCE++: rewards-to-go with the KL in the reward, whitened over the episode, without a critic.",
    config=ReinforceConfig,
    build="rlhf_group.critic_free:build",
)
rejection_sampling = Component(
    summary="Rejection sampling and expert iteration: cross-entropy on the best of the policy's own answers.",
    config=RejectionSamplingConfig,
    build="rlhf_group.critic_free:build",
)
online_dpo = Component(
    summary="Online DPO: a preference loss on the best and the worst of the policy's own answers to each prompt.",
    config=OnlineDPOConfig,
    build="rlhf_group.critic_free:build",
)
