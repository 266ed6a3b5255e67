"""KTO: each answer is good or bad by itself, measured against how far the policy has moved from the reference."""

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

_HINT = 'each line needs {"prompt": …, "completion": "…", "label": true or false}, or chosen and rejected'

MEASURED_ITEMS = 128
"""Most items of an episode whose prompts are asked for the KL."""


def kto_loss(
    log_ratios: Tensor,
    good: Tensor,
    kl: float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """[B] losses of log-ratios x to the reference (nats), `good` [B] bool (Ethayarajh 2024, equation 8).

    A good answer's is desirable_weight (1 - sigmoid(beta (x - kl))), a bad one's undesirable_weight (1 - sigmoid(beta
    (kl - x))).
    """
    gain = beta * (log_ratios - kl)
    return torch.where(good, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain))


class KTO(PairLines):
    """Mean loss over the answers of the global batch."""

    name = "kto"
    roles: frozenset[Role] = frozenset({"policy", "reference"})
    config: KTOConfig
    _kl = 0.0
    """Nats; measured at the start of each episode. Held-out answers are measured against the newest."""

    def check_record(self, record: Mapping[str, Any]) -> None:
        """Raise `DataError` for a line that is neither a judged answer nor a pair."""
        if "label" not in record and "chosen" in record:
            super().check_record(record)
            return
        label = record.get("label")
        if not isinstance(label, bool):
            raise DataError(f"the record's `label` is {label!r}, not true or false", where="kto", hint=_HINT)
        self._check_text(record, "completion", _HINT)

    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Answers | None:
        """`prompt` with `completion` and `label` (true: good), or with `chosen` and `rejected`."""
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

        Ethayarajh 2024, section 4.1. Once an episode and over all ranks, so that it is the same however a batch is cut.
        """
        measured = mismatched(items[:MEASURED_ITEMS]) if len(items) > 1 else []
        gaps = [float(ours[0] - its[0]) for ours, its in zip(policy(measured), reference(measured), strict=True)]
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
        """Rewards (beta times log-ratio) of the good and the bad, and whether pairs are told apart."""
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
