"""Decides which rows may share a forward pass of a model, for trainer and engine alike.

A token's log-prob may depend on the tokens before it in its own row and on nothing else. Requirements by kind of
model:

- Every causal model keeps rows apart when all start in the first column: padding follows them, where no token attends.
  All passes over finished rows run so: scoring, update, critic, reference, reward models.
- Transformers accepted by `packs` need no padding: all tokens are in one row.
- Left padding is neutral only for models that mask it and take each token's position. Decoding batches of prompts
  without slots needs it; `padding_problem` tells for which models it is not neutral.
- Rotary embeddings that depend on the longest row of a pass (`length_switches`) are computed separately for each row
  (`row_lengths.py`), and the engine recomputes a row that passes a switch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .architectures import has_trait


def packs(config: Any) -> bool:
    """Whether a transformers model with this config may run samples concatenated in a single row."""
    return (
        has_trait(config, "packs")
        and config._attn_implementation == "sdpa"
        # The load-balancing loss of experts needs the mask of padded rows.
        and not getattr(config, "output_router_logits", False)
    )


def padding_problem(config: Any, forward_parameters: Iterable[str]) -> str | None:
    """Why padding before a row, or between it and its next token, changes the row's output; None if it is neutral.

    Where it does, only rows of one length may decode together.
    forward_parameters: the names that the model's forward takes.
    """
    if has_trait(config, "feels-padding"):
        return f"{config.model_type} feels empty columns"
    if not {"position_ids", "attention_mask"} <= set(forward_parameters):
        return "its forward takes no position_ids and attention_mask"
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if not all(isinstance(layer, DynamicLayer) for layer in DynamicCache(config=config).layers):
        return "it has a recurrent state, which padding would change"
    return None
