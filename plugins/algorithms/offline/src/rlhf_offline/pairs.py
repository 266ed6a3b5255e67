"""Preference pairs: a chosen and a rejected answer to the same prompt."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_core.algorithm import LossOutput, Mean
from rlhf_core.components import AlgorithmContext
from rlhf_core.errors import DataError
from rlhf_forward import masked_sum

from .answers import Answers, AnswersBatch, KnownReference, collate_answers
from .config import AnswerPairConfig, RewardModelConfig
from .examples import answer_example, answer_log_probs
from .policy_only import PolicyOnly

_HINT = 'write lines with {"prompt": …, "chosen": "…", "rejected": "…"}'


class PairLines(PolicyOnly[Answers, AnswersBatch]):
    """Learns from lines with a chosen and a rejected answer to one prompt."""

    name: ClassVar[str]
    """Name of the algorithm in error messages."""
    config: AnswerPairConfig | RewardModelConfig
    per_token = False
    """Whether an answer's log-prob is the mean over its tokens instead of the sum."""

    def __init__(self, config: AnswerPairConfig | RewardModelConfig, context: AlgorithmContext) -> None:
        super().__init__(config, context)
        self._known = KnownReference()

    def check_record(self, record: Mapping[str, Any]) -> None:
        for key in ("chosen", "rejected"):
            self._check_text(record, key, _HINT)

    def _check_text(self, record: Mapping[str, Any], key: str, hint: str) -> None:
        if not isinstance(record.get(key), str) or not record[key]:
            problem = f"the record's `{key}` must be text, and not empty (its keys: {', '.join(sorted(record))})"
            raise DataError(problem, where=self.name, hint=hint)

    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Answers | None:
        """Encode `prompt` (text or chat messages), `chosen` and `rejected` (texts). None if both are the same."""
        self.check_record(record)
        if record["chosen"] == record["rejected"]:
            return None
        return self._answers(record, ("chosen", "rejected"), (True, False), tokenizer)

    def _answers(
        self,
        record: Mapping[str, Any],
        keys: Sequence[str],
        good: tuple[bool, ...],
        tokenizer: PreTrainedTokenizerBase,
    ) -> Answers | None:
        """Encode the answers with these keys. None if one is too long."""
        add_eos, where, kind = self.config.add_eos, self.name, self.kind
        answers = [
            answer_example(record, record[key], tokenizer, add_eos=add_eos, where=where, kind=kind) for key in keys
        ]
        is_too_long = max(each.num_tokens for each in answers) > self.config.max_tokens
        return None if is_too_long else Answers(tuple(answers), good)

    def collate(self, items: Sequence[Answers]) -> AnswersBatch:
        return collate_answers(items, pad_id=self._pad_id)

    def values(self, model: nn.Module, batch: AnswersBatch) -> Tensor:
        """Log-prob of each row's answer, the sum over its tokens or the mean, [R] float32 nats."""
        values = answer_log_probs(model, batch.examples)
        return values / batch.examples.target_mask.sum(-1).clamp(min=1) if self.per_token else values

    def prepare_items(
        self, items: Sequence[Answers], reference: Callable[[Sequence[Answers]], Sequence[Tensor]]
    ) -> Sequence[Answers]:
        """Add the reference's log-probs, if there is a reference. Each line is computed once and cached."""
        return self._known.fill(items, reference) if "reference" in self.roles else items

    def reference_forward(self, model: nn.Module, batch: AnswersBatch) -> Tensor:
        """Log-probs of each line's answers, [B, 2] in nats, with 0 for a missing answer."""
        return batch.by_line(self.values(model, batch))


class PairAlgorithm(PairLines):
    """Trains the policy on pairs. The loss is a mean over the pairs of the global batch."""

    @abstractmethod
    def pair_loss(self, chosen: Tensor, rejected: Tensor, batch: AnswersBatch) -> PairLoss:
        """Losses of pairs whose answers have these `values`, [B] each."""

    def loss(self, models: Mapping[str, nn.Module], batch: AnswersBatch) -> LossOutput:
        """Loss and metrics over the pairs that count."""
        result, counts = self.pair_loss(*batch.pairs(self.values(models["policy"], batch)), batch), batch.counts
        number = counts.sum()
        means = {
            "margin": result.chosen_rewards - result.rejected_rewards,
            "chosen_reward": result.chosen_rewards,
            "rejected_reward": result.rejected_rewards,
            **result.metrics,
        }
        is_right = result.chosen_rewards > result.rejected_rewards  # a tie counts as wrong
        metrics = {"preference/accuracy": Mean((is_right & counts).sum(), number)}
        metrics |= {f"preference/{name}": Mean(masked_sum(each, counts), number) for name, each in means.items()}
        return LossOutput({"policy": masked_sum(result.losses, counts)}, metrics)

    def counts(self, batch: AnswersBatch) -> Mapping[str, float]:
        return {"policy": float(batch.counts.sum())}


@dataclass(frozen=True, slots=True)
class PairLoss:
    """Losses and rewards of a batch of pairs, not yet aggregated, [B] float32 each."""

    losses: Tensor
    chosen_rewards: Tensor
    """Detached scores (reward models), implicit rewards (DPO), or log-probs per token (ORPO, SimPO)."""
    rejected_rewards: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Other values of the pairs, [B] each, by the name of their mean."""
