"""Truncated importance sampling and masks of far off-policy samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.functional import mean_over_ranks, off_policy_correction
from rlhf_core.types import Experience
from rlhf_core.whole import AllReduce

from .config import CriticFreeConfig


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance weights and the new action mask of an episode's tokens."""

    weights: Tensor
    """[B, A] float32, 0 where not kept. Multiplied into the advantages, as every loss is proportional to them."""
    kept: Tensor
    """[B, A] bool, the new action mask."""
    metrics: dict[str, float]


def correct(config: CriticFreeConfig, episode: Experience, all_reduce: AllReduce) -> Correction:
    """Compute the correction from the trainer's and the engine's log-probs, under the options. Collective."""
    assert episode.trainer_log_probs is not None
    mask = episode.action_mask
    result = off_policy_correction(
        episode.trainer_log_probs,
        episode.action_log_probs,
        mask,
        cap=config.importance_cap,
        level=config.importance_level,
        token_range=config.importance_token_range,
        sequence_range=config.importance_sequence_range,
        all_reduce=all_reduce,
    )
    metrics = {
        "off_policy/effective_sample_size": float(result.effective_sample_size),
        "off_policy/weight_mean": float(mean_over_ranks(result.weights, result.kept, all_reduce)),
        "off_policy/truncated_fraction": float(mean_over_ranks(result.truncated.float(), mask, all_reduce)),
        "off_policy/masked_fraction": 1.0 - float(mean_over_ranks(result.kept.float(), mask, all_reduce)),
        "off_policy/ratio_max": float(all_reduce(torch.where(mask, result.ratio, 0.0).max(), "max")),
    }
    return Correction(result.weights, result.kept, metrics)
