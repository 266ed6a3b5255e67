"""Importance weights and masks of off-policy tokens, from the options of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.episode_view import EpisodeView
from rlhf_core.types import Experience
from rlhf_forward import mean_over_ranks

from . import DivergenceBound, off_policy_correction
from .section import PolicyObjectiveSection

if TYPE_CHECKING:
    from torch import Tensor


def importance_weights(
    config: PolicyObjectiveSection, episode: Experience, view: EpisodeView, metrics: dict[str, float]
) -> tuple[Tensor, Tensor]:
    """Return [R, A] weights (0 for dropped tokens) and the [R, A] bool mask of kept tokens. Collective.

    They are computed from the trainer's and the engine's log-probs at the start of the episode. `metrics` is updated.
    """
    import torch

    assert episode.trainer_log_probs is not None
    mask, reduce = episode.action_mask, view.all_reduce
    bound = None
    if config.divergence_bound is not None:
        bound = DivergenceBound(config.divergence_bound, config.divergence_estimator, config.divergence_level)
    result = off_policy_correction(
        episode.trainer_log_probs,
        episode.action_log_probs,
        mask,
        cap=config.importance_cap,
        level=config.importance_level,
        token_range=config.importance_token_range,
        sequence_range=config.importance_sequence_range,
        outlier_range=config.importance_outlier_range,
        divergence=bound,
        all_reduce=reduce,
    )
    metrics |= {
        "off_policy/effective_sample_size": float(result.effective_sample_size),
        "off_policy/weight_mean": float(mean_over_ranks(result.weights, result.kept, reduce)),
        "off_policy/truncated_fraction": float(mean_over_ranks(result.truncated.float(), mask, reduce)),
        "off_policy/masked_fraction": 1.0 - float(mean_over_ranks(result.kept.float(), mask, reduce)),
        "off_policy/ratio_max": float(view.all_reduce(torch.where(mask, result.ratio, 0.0).max(), "max")),
    }
    return result.weights, result.kept
