"""Metrics of one micro-batch, common to all algorithms with a policy loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..algorithm import Mean, Metric

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.forward import PolicyOutput
    from .losses import PolicyLoss


def policy_metrics(policy: PolicyLoss, output: PolicyOutput, old_log_probs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Means over the True positions of `mask` ([B, A] bool, as the tensors of `policy` and `output`).

    `policy/approx_kl` is the k3 estimate, in nats, of the policy's KL from the one that gave `old_log_probs`.
    """
    import torch

    from .kl import kl_estimate
    from .masking import masked_sum

    tokens = mask.sum()
    new = torch.where(mask, output.log_probs.detach(), 0.0)
    moved = kl_estimate(torch.where(mask, old_log_probs, 0.0), new, "k3")
    metrics: dict[str, Metric] = {
        "policy/clip_fraction": Mean(policy.clipped.sum(), tokens),
        "policy/ratio_mean": Mean(masked_sum(policy.ratio, mask), tokens),
        "policy/approx_kl": Mean(masked_sum(moved, mask), tokens),
    }
    if output.entropy is not None:
        metrics["policy/entropy"] = Mean(masked_sum(output.entropy.detach(), mask), tokens)
    return metrics
