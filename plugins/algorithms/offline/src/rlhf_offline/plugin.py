"""The entry points of the offline algorithms."""

from __future__ import annotations

from rlhf_core import Component

from .config import (
    DPOConfig,
    KTOConfig,
    ORPOConfig,
    ProcessRewardModelConfig,
    RewardModelConfig,
    SFTConfig,
    SimPOConfig,
)

sft = Component(
    summary="Supervised fine-tuning: cross-entropy on the answers of a dataset.",
    config=SFTConfig,
    build="rlhf_offline.sft:SFT",
    feeds="dataset",
)
dpo = Component(
    summary="DPO: learns from preference pairs directly, without a reward model.",
    config=DPOConfig,
    build="rlhf_offline.dpo:DPO",
    feeds="dataset",
)
kto = Component(
    summary="KTO: learns from answers that are good or bad each, without pairs or a reward model.",
    config=KTOConfig,
    build="rlhf_offline.kto:KTO",
    feeds="dataset",
)
orpo = Component(
    summary="ORPO: supervised learning and preference in one loss on pairs, without a reference model.",
    config=ORPOConfig,
    build="rlhf_offline.orpo:ORPO",
    feeds="dataset",
)
simpo = Component(
    summary="SimPO: learns from pairs by mean log-prob per token and a margin, without a reference model.",
    config=SimPOConfig,
    build="rlhf_offline.simpo:SimPO",
    feeds="dataset",
)
reward_model = Component(
    summary="Reward model: a sequence classifier that scores answers, from preference pairs.",
    config=RewardModelConfig,
    build="rlhf_offline.reward_model:RewardModel",
    feeds="dataset",
)
process_reward_model = Component(
    summary="Process reward model: scores each step of an answer, from steps that are right or wrong.",
    config=ProcessRewardModelConfig,
    build="rlhf_offline.process_reward_model:ProcessRewardModel",
    feeds="dataset",
)
