"""Log-probs and entropy from inside a model's own forward, without ever holding all logits.

While `lean_head` is open, the language-model head answers with two numbers a position, the log-prob of its label and
the entropy, instead of V logits (`chunked.py`). The model is still called as a whole, through whatever wraps it, so
sharded weights are gathered as always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    model: nn.Module,
    of_actions: Callable[[Tensor], Tensor],
    labels: Tensor,
    temperature: float,
    *,
    with_entropy: bool,
) -> Iterator[None]:
    """Inside, the model's `logits` are [N, 2]: log-prob of each of the `labels` ([N]) and entropy (0 if not asked for).

    `of_actions` picks from the hidden states that the head is given those that the labels follow, [N, H].
    """
    head = _head(model)
    assert isinstance(head, nn.Linear)
    chunk_tokens = max(1, CHUNK_LOGITS // head.out_features)

    def forward(hidden: Tensor) -> Tensor:
        result = chunked_log_probs_and_entropy(
            of_actions(hidden), head.weight, labels, temperature, head.bias, chunk_tokens, with_entropy
        )
        entropy = torch.zeros_like(result.log_probs) if result.entropy is None else result.entropy
        return torch.stack([result.log_probs, entropy], dim=-1)

    head.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.forward


def _head(model: nn.Module) -> object:
    find = getattr(model, "get_output_embeddings", None)
    return find() if callable(find) else None
