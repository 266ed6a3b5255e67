"""The loss of PPO's critic, and metrics of how well it knows the returns."""

from __future__ import annotations

from torch import Tensor, nn

from rlhf_core.algorithm import Mean, Metric
from rlhf_core.functional import aggregate_sum, explained_variance, mean_over_ranks, value_loss
from rlhf_core.models import value_forward
from rlhf_core.types import Experience
from rlhf_core.whole import Whole


def critic_metrics(episode: Experience, whole: Whole, returns: Tensor) -> dict[str, float]:
    """Metrics over all rows of the episode. Collective."""
    assert episode.values is not None
    mask, reduce = episode.action_mask, whole.all_reduce
    metrics = {
        "value/mean": float(mean_over_ranks(episode.values, mask, reduce)),
        "returns/mean": float(mean_over_ranks(returns, mask, reduce)),
    }
    explained = explained_variance(episode.values, returns, mask, reduce)
    if explained is not None:
        metrics["value/explained_variance"] = explained
    return metrics


def value_sum(critic: nn.Module, batch: Experience, *, clip_eps: float | None) -> tuple[Tensor, dict[str, Metric]]:
    """Forward a micro-batch through the critic: the sum of its loss over the tokens."""
    assert batch.values is not None and batch.returns is not None
    mask = batch.action_mask
    result = value_loss(value_forward(critic, batch), batch.values, batch.returns, mask, clip_eps=clip_eps)
    clipped = Mean(result.clipped.sum(), mask.sum())
    return aggregate_sum(result.losses, mask, "token-mean"), {"value/clip_fraction": clipped}
