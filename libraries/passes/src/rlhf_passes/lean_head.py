"""Computes log-probs and entropy inside a model's own forward pass, without ever holding all logits.

Inside `lean_head`, the language-model head returns two numbers per position, the log-prob of its label and the
entropy, instead of V logits (`chunked.py`). The model is still called through its wrappers, so sharded weights are
gathered as usual. A head that holds only some rows of the vocabulary declares them in its attribute `vocabulary_part`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rlhf_forward.architectures import has_trait
from rlhf_forward.logprobs import Temperature
from rlhf_forward.replaced_forwards import replaced_forwards

from .chunked import Chunked
from .mixed_linear import is_mixed
from .vocabulary_gradients import adds_directly, find_submodule

MIN_LOGITS = 1 << 24
"""Minimum number of logits. For smaller outputs (64 MB in float32) recomputation is not worth its time."""
MIN_MIXED_LOGITS = 1 << 20
"""The same in bfloat16, in which a product takes less time than operations on its logits."""

CHUNK_LOGITS = 1 << 22
"""Number of logits held at a time: 16 MB in float32."""


def has_plain_logits(model: nn.Module) -> bool:
    """Whether the logits of the innermost `model` are its head's output, and nothing else keeps them."""
    return has_trait(getattr(model, "config", None), "plain-head")


def can_be_lean(model: nn.Module, num_tokens: int) -> bool:
    """Whether the innermost `model` supports `lean_head` and `num_tokens` is large enough to be worthwhile."""
    head = find_submodule(model, "get_output_embeddings")
    return (
        has_plain_logits(model)
        and type(head) is nn.Linear
        # Gemini fetches parameters in torch operations only, not in our autograd function.
        and type(head.weight) in (nn.Parameter, torch.distributed.tensor.DTensor)
        and num_tokens * head.out_features >= (MIN_MIXED_LOGITS if is_mixed(head.weight) else MIN_LOGITS)
    )


@contextmanager
def lean_head(
    model: nn.Module,
    of_actions: Callable[[Tensor], Tensor],
    labels: Tensor,
    temperature: Temperature,
    *,
    with_entropy: bool,
) -> Iterator[None]:
    """Context in which the model's `logits` are [N, 2]: log-prob of each label ([N]) and entropy (0 if not requested).

    `of_actions` selects the hidden states at the positions before the labels, [N, H], from the head's input.
    """
    head = find_submodule(model, "get_output_embeddings")
    assert isinstance(head, nn.Linear)
    chunked = Chunked(
        max(1, CHUNK_LOGITS // head.out_features),
        temperature,
        with_entropy,
        part=getattr(head, "vocabulary_part", None),
        direct=adds_directly(head),
    )

    def forward(hidden: Tensor) -> Tensor:
        return torch.stack(chunked.of(of_actions(hidden), head.weight, labels, head.bias), dim=-1)

    with replaced_forwards([(head, forward)]):
        yield
