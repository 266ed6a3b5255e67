"""Rules for rows that share a forward pass of a model, used by trainer and engine.

A token's log-prob must depend only on earlier tokens in the same row. Requirements by kind of model:

- Every causal model keeps rows separate if all start in the first column: padding follows them, and no token attends to
  it. All passes over finished rows do this: scoring, update, critic, reference, reward models.
- Transformers accepted by `packs` do not need padding: all tokens are in one row.
- Left padding is neutral only for models that mask it and accept each token's position. Decoding batches of prompts
  without slots needs it. `padding_problem` identifies the models for which it is not neutral.
- Rotary embeddings that depend on the longest row of a pass (`length_switches`) are computed separately for each row
  (`row_lengths.py`), and the engine recomputes a row that crosses a switch.
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
    """Return the reason why padding before a row, or between it and its next token, changes the row's output.

    If it does, only rows of equal length may be decoded together.

    Args:
        config: The model's transformers config.
        forward_parameters: Names of the parameters of the model's forward.

    Returns:
        The reason as text, or None if padding is neutral.
    """
    if has_trait(config, "feels-padding"):
        return f"the output of {config.model_type} depends on padding"
    if not {"position_ids", "attention_mask"} <= set(forward_parameters):
        return "its forward does not accept position_ids and attention_mask"
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if not all(isinstance(layer, DynamicLayer) for layer in DynamicCache(config=config).layers):
        return "it has a recurrent state, which padding would change"
    return None
