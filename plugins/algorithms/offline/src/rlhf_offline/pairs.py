"""Preference pairs: a chosen and a rejected answer to one prompt."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_core.algorithm import LossOutput, Mean
from rlhf_core.errors import DataError
from rlhf_forward import masked_sum

from .answers import Answers, AnswersBatch, collate_answers
from .examples import answer_example, answer_log_probs
from .policy_only import PolicyOnly

_HINT = 'each line needs {"prompt": …, "chosen": "…", "rejected": "…"}'


class PairAlgorithm(PolicyOnly[Answers, AnswersBatch]):
    """An algorithm that trains the policy on pairs; the loss is a mean over the pairs of the global batch."""

    def __init__(
        self, name: str, *, max_tokens: int, add_eos: bool = True, use_margin: bool = False, per_token: bool = False
    ) -> None:
        """name: how errors about a line call the algorithm. per_token: log-probs of answers are means over tokens."""
        self._name = name
        self._max_tokens = max_tokens
        self._add_eos = add_eos
        self._use_margin = use_margin
        self._per_token = per_token

    @abstractmethod
    def pair_loss(self, chosen: Tensor, rejected: Tensor, batch: AnswersBatch) -> PairLoss:
        """The losses of pairs whose answers have these `values`, [B] each."""

    def values(self, model: nn.Module, batch: AnswersBatch) -> Tensor:
        """[R] float32: the log-prob of each row's answer in nats, the sum over its tokens or their mean."""
        values = answer_log_probs(model, batch.examples)
        return values / batch.examples.target_mask.sum(-1).clamp(min=1) if self._per_token else values

    def loss(self, models: Mapping[str, nn.Module], batch: AnswersBatch) -> LossOutput:
        """The loss and its metrics over the pairs that count."""
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

    def check_record(self, record: Mapping[str, Any]) -> None:
        check_pair(record, use_margin=self._use_margin, where=self._name)

    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Answers | None:
        """`prompt` (text or chat messages), `chosen` and `rejected` (texts), with `use_margin` a `margin`."""
        return encode_pair(
            record,
            tokenizer,
            max_tokens=self._max_tokens,
            add_eos=self._add_eos,
            use_margin=self._use_margin,
            where=self._name,
        )

    def collate(self, items: Sequence[Answers]) -> AnswersBatch:
        return collate_answers(items)

    def counts(self, batch: AnswersBatch) -> Mapping[str, float]:
        return {"policy": float(batch.counts.sum())}


def encode_pair(
    record: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    add_eos: bool,
    use_margin: bool,
    where: str,
) -> Answers | None:
    """`prompt`, `chosen` and `rejected` (texts) to a pair; None when an answer is too long or both are the same."""
    check_pair(record, use_margin=use_margin, where=where)
    margin = record["margin"] if use_margin else 0.0
    answers = tuple(
        answer_example(record, record[key], tokenizer, add_eos=add_eos, where=where) for key in ("chosen", "rejected")
    )
    too_long = max(each.num_tokens for each in answers) > max_tokens
    return None if too_long or record["chosen"] == record["rejected"] else Answers(answers, margin=float(margin))


def check_pair(record: Mapping[str, Any], *, use_margin: bool, where: str) -> None:
    """Raise `DataError`, as `where`, for a record that lacks a text or the margin."""
    for key in ("chosen", "rejected"):
        if not isinstance(record.get(key), str) or not record[key]:
            raise DataError(
                f"the record has no text `{key}` (its keys: {', '.join(sorted(record))})", where=where, hint=_HINT
            )
    margin = record.get("margin") if use_margin else 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise DataError(
            f"the record's `margin` is {margin!r}, not a number", where=where, hint="or set use_margin: false"
        )


@dataclass(frozen=True, slots=True)
class PairLoss:
    """Losses and rewards of a batch of pairs, not yet aggregated: all [B] float32."""

    losses: Tensor
    chosen_rewards: Tensor
    """Detached scores (reward models), implicit rewards (DPO), or log-probs per token (ORPO, SimPO)."""
    rejected_rewards: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """More values of the pairs, [B] each, by the name of their mean."""
