"""Preference pairs: a chosen and a rejected answer to the same prompt."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_core.algorithm import LossOutput
from rlhf_core.components import AlgorithmContext
from rlhf_core.errors import DataError
from rlhf_objective import PairLoss, sum_of_pairs

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
        result = self.pair_loss(*batch.pairs(self.values(models["policy"], batch)), batch)
        total, metrics = sum_of_pairs(result, batch.counts)
        return LossOutput({"policy": total}, metrics)

    def counts(self, batch: AnswersBatch) -> Mapping[str, float]:
        return {"policy": float(batch.counts.sum())}
