"""DPO: learn from pairs directly, with the policy's own log-probs as the reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_core.algorithm import LossOutput
from rlhf_core.components import AlgorithmContext
from rlhf_core.functional import dpo_loss
from rlhf_core.types import Role

from .config import DPOConfig
from .examples import answer_log_probs
from .pairs import Pair, PairAlgorithm, PairBatch, check_pair, encode_pair, pair_output


def build(config: DPOConfig, context: AlgorithmContext) -> DPO:
    """DPO under its options."""
    return DPO(config)


class DPO(PairAlgorithm):
    """Mean preference loss over the pairs of the global batch."""

    def __init__(self, config: DPOConfig) -> None:
        self._config = config
        self._known: dict[bytes, Tensor] = {}
        """Digest of a pair -> [2] what the reference says of it: asked once, whatever the number of epochs."""

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset({"policy"} if self._config.reference_free else {"policy", "reference"})

    def check_record(self, record: Mapping[str, Any]) -> None:
        check_pair(record, use_margin=False, where="dpo")

    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Pair | None:
        """`prompt` (text or chat messages), `chosen` and `rejected` (texts)."""
        config = self._config
        return encode_pair(
            record, tokenizer, max_tokens=config.max_tokens, add_eos=config.add_eos, use_margin=False, where="dpo"
        )

    def prepare_items(
        self, items: Sequence[Pair], reference: Callable[[Sequence[Pair]], Sequence[Tensor]]
    ) -> Sequence[Pair]:
        """Add the reference's log-probs of both answers; each pair is computed once and remembered."""
        if self._config.reference_free:
            return items
        keys = [_digest(item) for item in items]
        unknown = {key: item for key, item in zip(keys, items, strict=True) if key not in self._known}
        self._known.update(zip(unknown, reference(list(unknown.values())), strict=True))
        return [replace(item, reference=self._known[key]) for key, item in zip(keys, items, strict=True)]

    def reference_forward(self, model: nn.Module, batch: PairBatch) -> Tensor:
        """[B, 2] log-probs of chosen and rejected, in nats."""
        return torch.stack(self._log_probs(model, batch), dim=-1)

    def loss(self, models: Mapping[str, nn.Module], batch: PairBatch) -> LossOutput:
        chosen, rejected = self._log_probs(models["policy"], batch)
        reference = (None, None) if batch.reference is None else batch.reference.unbind(-1)
        config = self._config
        result = dpo_loss(
            chosen, rejected, *reference, beta=config.beta, kind=config.loss, label_smoothing=config.label_smoothing
        )
        return pair_output(result, batch.counts)

    def _log_probs(self, model: nn.Module, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """[B] each: log-probs of the chosen and the rejected answers, summed over tokens (IPO: their mean)."""
        values = answer_log_probs(model, batch.examples)
        if self._config.loss == "ipo":
            values = values / batch.examples.target_mask.sum(-1).clamp(min=1)
        chosen, rejected = values.chunk(2)
        return chosen, rejected


def _digest(pair: Pair) -> bytes:
    prompt_tokens = int((~pair.chosen.loss_mask).sum())
    ids = [prompt_tokens, *pair.chosen.input_ids.tolist(), -1, *pair.rejected.input_ids.tolist()]
    return blake2b(repr(ids).encode(), digest_size=16).digest()
