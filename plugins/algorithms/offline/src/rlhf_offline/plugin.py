"""The entry points of the offline algorithms."""

from __future__ import annotations

from rlhf_core import Component

from .config import DPOConfig, RewardModelConfig, SFTConfig

sft = Component(
    summary="Supervised fine-tuning: cross-entropy on the answers of a dataset.",
    config=SFTConfig,
    build="rlhf_offline.sft:build",
    feeds="dataset",
)
dpo = Component(
    summary="DPO: learns from preference pairs directly, without a reward model.",
    config=DPOConfig,
    build="rlhf_offline.dpo:build",
    feeds="dataset",
)
reward_model = Component(
    summary="Reward model: a sequence classifier that scores answers, from preference pairs.",
    config=RewardModelConfig,
    build="rlhf_offline.reward_model:build",
    feeds="dataset",
)
