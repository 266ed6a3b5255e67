"""Log-probs and entropy from inside a model's own forward, without ever holding all logits.

While `lean_head` is open, the language-model head answers with two numbers a position, the log-prob of its label and
the entropy, instead of V logits (`chunked.py`). The model is still called as a whole, through whatever wraps it, so
sharded weights are gathered as always.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .chunked import chunked_log_probs_and_entropy

PLAIN_HEADS = frozenset(
    {"llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm"}
)
"""Model types whose logits are the head's output and nothing after it (no soft cap, no scale)."""

MIN_LOGITS = 1 << 24
"""Smaller outputs (64 MB in float32) are not worth computing twice."""

CHUNK_LOGITS = 1 << 22
"""Logits held at a time: 16 MB in float32."""


def can_be_lean(model: nn.Module, num_tokens: int) -> bool:
    """Whether the innermost `model` can answer in this way, and has enough tokens to make it worth while."""
    config = getattr(model, "config", None)
    head = _head(model)
    return (
        getattr(config, "model_type", None) in PLAIN_HEADS
        and type(head) is nn.Linear
        # Gemini's parameters are fetched by torch operations only, not by an autograd function of our own.
        and type(head.weight) in (nn.Parameter, torch.distributed.tensor.DTensor)
        and num_tokens * head.out_features >= MIN_LOGITS
    )


@contextmanager
def lean_head(
    model: nn.Module, labels: Tensor, mask: Tensor, temperature: float, *, with_entropy: bool
) -> Iterator[None]:
    """Inside, the model's `logits` are [B, A + 1, 2]: log-prob of `labels` ([B, A]) and entropy, 0 outside `mask`.

    The model is to be called with `logits_to_keep = A + 1`; the last position predicts nothing and stays 0.
    """
    head = _head(model)
    assert isinstance(head, nn.Linear)
    chunk_tokens = max(1, CHUNK_LOGITS // head.out_features)

    def forward(hidden: Tensor) -> Tensor:
        result = chunked_log_probs_and_entropy(
            hidden[:, -labels.shape[1] - 1 : -1][mask],
            head.weight,
            labels[mask],
            temperature,
            head.bias,
            chunk_tokens,
            with_entropy,
        )
        entropy = torch.zeros_like(result.log_probs) if result.entropy is None else result.entropy
        packed = torch.zeros(*labels.shape, 2, dtype=torch.float32, device=hidden.device)
        packed = packed.index_put((mask,), torch.stack([result.log_probs, entropy], dim=-1))
        return torch.cat([packed, packed.new_zeros(labels.shape[0], 1, 2)], dim=1)

    head.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.forward


def _head(model: nn.Module) -> object:
    find = getattr(model, "get_output_embeddings", None)
    return find() if callable(find) else None
