"""KTO: each answer is good or bad by itself, relative to the policy's KL from the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_core.algorithm import LossOutput, Mean
from rlhf_core.errors import DataError
from rlhf_core.types import Role
from rlhf_forward import masked_sum

from .answers import Answers, AnswersBatch, mismatched
from .config import KTOConfig
from .pairs import PairLines

_HINT = 'write lines with {"prompt": …, "completion": "…", "label": true or false}, or with chosen and rejected'

MEASURED_ITEMS = 128
"""Maximum number of items per episode used to estimate the KL."""


def kto_loss(
    log_ratios: Tensor,
    good: Tensor,
    kl: float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Losses of log-ratios to the reference (Ethayarajh 2024, equation 8).

    With log-ratio x, the loss of a good answer is desirable_weight (1 - sigmoid(beta (x - kl))), that of a bad answer
    undesirable_weight (1 - sigmoid(beta (kl - x))).

    Args:
        log_ratios: [B] float32, in nats.
        good: [B] bool.
        kl: KL of the policy from the reference, in nats, at least 0.
        beta: How fast the value saturates.
        desirable_weight, undesirable_weight: Weights of good and bad answers.

    Returns:
        [B] losses.

    Example:
        >>> import torch
        >>> kto_loss(torch.zeros(2), torch.tensor([True, False]), 0.0, beta=0.1, undesirable_weight=2.0)
        tensor([0.5000, 1.0000])
    """
    gain = beta * (log_ratios - kl)
    return torch.where(good, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain))


class KTO(PairLines):
    """Mean loss over the answers of the global batch."""

    name = "kto"
    roles: frozenset[Role] = frozenset({"policy", "reference"})
    config: KTOConfig
    _kl = 0.0
    """KL in nats, estimated at the start of each episode. Held-out answers use the latest estimate."""

    def check_record(self, record: Mapping[str, Any]) -> None:
        """Raise `DataError` if the line is neither a labeled answer nor a pair."""
        if "label" not in record and "chosen" in record:
            super().check_record(record)
            return
        label = record.get("label")
        if not isinstance(label, bool):
            raise DataError(f"the record's `label` must be true or false, got {label!r}", where="kto", hint=_HINT)
        self._check_text(record, "completion", _HINT)

    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Answers | None:
        """Encode `prompt` with `completion` and `label` (true: good), or with `chosen` and `rejected`."""
        if "label" not in record and "chosen" in record:
            return super().encode(record, tokenizer)
        self.check_record(record)
        return self._answers(record, ("completion",), (record["label"],), tokenizer)

    def start_episode(
        self,
        items: Sequence[Answers],
        *,
        policy: Callable[[Sequence[Answers]], Sequence[Tensor]],
        reference: Callable[[Sequence[Answers]], Sequence[Tensor]],
    ) -> None:
        """Estimate the policy's KL from the reference on answers that belong to other prompts, at least 0.

        Ethayarajh 2024, section 4.1. It is computed once per episode over all ranks, so it does not depend on how
        batches are split.
        """
        measured = mismatched(items[:MEASURED_ITEMS]) if len(items) > 1 else []
        gaps = [float(p[0] - r[0]) for p, r in zip(policy(measured), reference(measured), strict=True)]
        self._kl = max(0.0, sum(gaps) / len(gaps)) if gaps else 0.0

    def counts(self, batch: AnswersBatch) -> Mapping[str, float]:
        return {"policy": float(batch.counts[batch.line].sum())}

    def loss(self, models: Mapping[str, nn.Module], batch: AnswersBatch) -> LossOutput:
        assert batch.reference is not None
        config, good, counts = self.config, batch.good, batch.counts[batch.line]
        ratios = self.values(models["policy"], batch) - batch.reference
        losses = kto_loss(
            ratios,
            good,
            self._kl,
            beta=config.beta,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
        )
        return LossOutput({"policy": masked_sum(losses, counts)}, self._metrics(ratios.detach(), batch))

    def _metrics(self, ratios: Tensor, batch: AnswersBatch) -> dict[str, Mean]:
        """Rewards (beta times log-ratio) of good and bad answers, and the accuracy on pairs."""
        counts, rewards = batch.counts[batch.line], self.config.beta * ratios
        good, bad = batch.good & counts, ~batch.good & counts
        chosen, rejected = batch.pairs(rewards)
        paired, _ = batch.pairs(counts)
        return {
            "preference/chosen_reward": Mean(masked_sum(rewards, good), good.sum()),
            "preference/rejected_reward": Mean(masked_sum(rewards, bad), bad.sum()),
            "preference/accuracy": Mean(((chosen > rejected) & paired).sum(), paired.sum()),
            "preference/margin": Mean(masked_sum(chosen - rejected, paired), paired.sum()),
            "kl/mean": Mean(self._kl * counts.sum(), counts.sum()),
        }
