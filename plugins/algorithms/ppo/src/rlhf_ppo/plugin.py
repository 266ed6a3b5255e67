"""Entry point of `ppo`."""

from __future__ import annotations

from rlhf_core import Component

from .config import PPOConfig

ppo = Component(
    summary="PPO with a critic, GAE, and a KL penalty to the initial policy.",
    config=PPOConfig,
    build="rlhf_ppo.algorithm:build",
    credits_turns=True,
)
