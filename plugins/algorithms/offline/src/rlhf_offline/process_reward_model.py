"""Process reward models: a score at the end of each step of an answer, learnt from steps that are right or wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedTokenizerBase

from rlhf_core.algorithm import LossOutput, Mean, ModelKind
from rlhf_core.components import AlgorithmContext
from rlhf_core.models import innermost, own_lengths

from .config import ProcessRewardModelConfig
from .policy_only import PolicyOnly
from .reward_model import set_pad_token
from .steps import Steps, StepsBatch, check_steps, collate_steps, encode_steps


def build(config: ProcessRewardModelConfig, context: AlgorithmContext) -> ProcessRewardModel:
    """Make the algorithm; the tokenizer gets a pad token other than EOS, as for a reward model."""
    return ProcessRewardModel(config, pad_id=set_pad_token(context.tokenizer))


class ProcessRewardModel(PolicyOnly[Steps, StepsBatch]):
    """Mean binary cross-entropy over the steps of the global batch (Lightman 2023, section 2.6)."""

    def __init__(self, config: ProcessRewardModelConfig, *, pad_id: int) -> None:
        self._config = config
        self._pad_id = pad_id

    @property
    def model_kind(self) -> ModelKind:
        return "sequence-classification"

    def check_record(self, record: Mapping[str, Any]) -> None:
        check_steps(record, separator=self._config.step_separator, where="process-reward-model")

    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Steps | None:
        """`prompt` (text or chat messages), `steps` (texts) and `labels` (true: the step is right)."""
        config = self._config
        return encode_steps(
            record,
            tokenizer,
            max_tokens=config.max_tokens,
            separator=config.step_separator,
            where="process-reward-model",
        )

    def collate(self, items: Sequence[Steps]) -> StepsBatch:
        return collate_steps(items, pad_id=self._pad_id)

    def counts(self, batch: StepsBatch) -> Mapping[str, float]:
        return {"policy": float(batch.right.numel())}

    def loss(self, models: Mapping[str, nn.Module], batch: StepsBatch) -> LossOutput:
        rows, right = batch.examples, batch.right
        scores = token_scores(models["policy"], rows.input_ids, rows.attention_mask)[rows.loss_mask]
        losses = binary_cross_entropy_with_logits(scores, right.float(), reduction="sum")
        says_right = scores.detach() > 0
        number, wrong = right.numel(), ~right
        return LossOutput(
            {"policy": losses},
            {
                "step/accuracy": Mean((says_right == right).sum(), number),
                "step/wrong_found": Mean((~says_right & wrong).sum(), wrong.sum()),
                "step/right_fraction": Mean(right.sum(), number),
            },
        )


def token_scores(model: nn.Module, input_ids: Tensor, mask: Tensor) -> Tensor:
    """[B, S] float32: the head's score at each token. The model is called as a whole, so that its wrappers take part.

    transformers computes the head at all tokens and gives that of the last; the others are taken at the head.
    """
    head: Any = innermost(model).score
    seen: list[Tensor] = []
    handle = head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        with own_lengths(model, mask.sum(1, keepdim=True)):
            output: Any = model(input_ids=input_ids, attention_mask=mask.long(), use_cache=False)
    finally:
        handle.remove()
    scores: Tensor = seen[-1].squeeze(-1).float()
    # The model's own output has to be part of the graph: sharded models gather their weights when its gradient comes.
    unread: Tensor = 0.0 * output.logits.float().sum()
    return scores + unread
