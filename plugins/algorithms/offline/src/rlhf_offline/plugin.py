"""Entry points of the offline algorithms."""

from __future__ import annotations

from functools import partial

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

dataset_algorithm = partial(Component, feeds="dataset")

sft = dataset_algorithm(
    "Supervised fine-tuning: cross-entropy on the answers of a dataset.", SFTConfig, "rlhf_offline.sft:SFT"
)
dpo = dataset_algorithm(
    "DPO: learns directly from preference pairs, without a reward model.", DPOConfig, "rlhf_offline.dpo:DPO"
)
kto = dataset_algorithm(
    "KTO: learns from single answers labeled good or bad, without pairs or a reward model.",
    KTOConfig,
    "rlhf_offline.kto:KTO",
)
orpo = dataset_algorithm(
    "ORPO: combines supervised learning and preference in one loss on pairs, without a reference model.",
    ORPOConfig,
    "rlhf_offline.orpo:ORPO",
)
simpo = dataset_algorithm(
    "SimPO: learns from pairs with the mean log-prob per token and a margin, without a reference model.",
    SimPOConfig,
    "rlhf_offline.simpo:SimPO",
)
reward_model = dataset_algorithm(
    "Reward model: trains a sequence classifier that scores answers on preference pairs.",
    RewardModelConfig,
    "rlhf_offline.reward_model:RewardModel",
)
process_reward_model = dataset_algorithm(
    "Process reward model: trains a classifier that scores each step of an answer on labeled steps.",
    ProcessRewardModelConfig,
    "rlhf_offline.process_reward_model:ProcessRewardModel",
)
