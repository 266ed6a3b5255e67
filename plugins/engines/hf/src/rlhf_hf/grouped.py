"""Grouped-query attention (GQA) for decoding steps, without copying the shared key-value heads.

transformers repeats keys and values for every query head whenever there is a mask. Since a row decodes one token, the
query heads that share a key-value head can be passed as query positions instead. The sums are the same, in a third to a
thirteenth of the time (9 heads over 3, 64 rows of 60 to 500 tokens, one core).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

ATTENTION = "rlhf_grouped"
"""Name of the attention function in transformers: `sdpa`, grouped if one token per row is decoded."""


@contextmanager
def grouped_attention(config: Any) -> Iterator[None]:
    """Context in which a model of this `config` decodes with grouped heads, if its attention is `sdpa` with GQA."""
    if not _shares_heads(config):
        yield
        return
    _register()
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def _shares_heads(config: Any) -> bool:
    """Whether this is `sdpa` with GQA. Nested configs are excluded, since setting the outer one also sets the inner."""
    heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return (
        getattr(config, "_attn_implementation", None) == "sdpa"
        and not getattr(config, "sub_configs", None)
        and isinstance(heads, int)
        and isinstance(shared, int)
        and shared < heads
    )


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        decodes = query.shape[2] == 1 and attention_mask is not None and attention_mask.shape[1] == 1
        if not decodes or query.shape[1] == key.shape[1] or options.get("position_bias") is not None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return _attend(query, key, value, attention_mask, options.get("scaling")), None

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """query [n, heads, 1, D], keys and values [n, shared heads, S, D], mask [n, 1, 1, S] -> [n, 1, heads, D]."""
    num_rows, num_heads, _, width = query.shape
    grouped = query.reshape(num_rows, key.shape[1], num_heads // key.shape[1], width)
    output = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    return output.reshape(num_rows, 1, num_heads, value.shape[3])
