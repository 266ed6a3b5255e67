"""Logits of a causal LM, whose forward may be wrapped and may not accept every argument."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.models.kinds import model_kind_of

from .padded_passes import ActionLabels, current_passes
from .row_lengths import own_lengths
from .rows import PaddedRows


def causal_lm_logits(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    logits_to_keep: int | None = None,
    columns: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Compute the logits of padded sequences.

    Args:
        model: A causal LM, possibly wrapped.
        input_ids: [B, S] int64, padded on either side.
        attention_mask: [B, S] bool, True = a real token.
        logits_to_keep: Number of last positions to compute, if the model supports it. None computes all.
        columns: Name -> [B, ...], inputs of the model from the prompts.

    Returns:
        [B, S, V] or [B, logits_to_keep, V], in the model's dtype.
    """
    inner = innermost(model)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask.long()}
    inputs |= model_kind_of(inner).inputs(input_ids, attention_mask, columns or {})
    return call(model, inner, inputs, logits_to_keep, attention_mask.sum(1, keepdim=True))


def call(
    model: nn.Module,
    inner: nn.Module,
    inputs: Mapping[str, Any],
    logits_to_keep: int | Tensor | None,
    lengths: Tensor,
) -> Tensor:
    """Run the model without arguments that the innermost model does not accept, and return its logits.

    `lengths`: [B, 1] or [B, S] int64, number of tokens of the row that each position belongs to.
    """
    parameters = inspect.signature(inner.forward).parameters
    accepted = {name: value for name, value in inputs.items() if name != "position_ids" or name in parameters}
    if "logits_to_keep" in parameters and logits_to_keep is not None:
        accepted["logits_to_keep"] = logits_to_keep
    if "use_cache" in parameters:
        accepted["use_cache"] = False
    with own_lengths(inner, lengths):
        output = model(**accepted)
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(f"a policy's forward must return an object with `logits`, got {type(output).__name__}")
    return logits


def innermost(module: nn.Module) -> nn.Module:
    """Return the model inside wrappers: DDP and boosters (`module`), `torch.compile`, PEFT.

    Args:
        module: The model, possibly wrapped several times.

    Example:
        >>> inner = nn.Linear(1, 1)
        >>> innermost(nn.DataParallel(inner)) is inner
        True
    """
    while True:
        if callable(base := getattr(module, "get_base_model", None)):
            inner: Any = base()
        else:
            inner = getattr(module, "_orig_mod", None) or getattr(module, "module", None)
        if not isinstance(inner, nn.Module) or inner is module:
            return module
        module = inner


def token_logits(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    is_read: Tensor,
    *,
    columns: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Compute the logits at some positions, in the layout of the applied passes.

    Args:
        model: A causal LM, possibly wrapped.
        input_ids: [B, S] int64, padded on the right.
        attention_mask: [B, S] bool, True = a real token.
        is_read: [B, S] bool, True = compute the logits of this position.
        columns: Name -> [B, ...], inputs of the model from the prompts.

    Returns:
        [N, V] for the N True positions of `is_read`, in the model's dtype.
    """
    inner = innermost(model)
    rows = lay_out(inner, PaddedRows(input_ids, attention_mask, is_read, columns or {}))
    logits: Tensor = rows.of_actions(call(model, inner, rows.inputs, rows.logits_to_keep, rows.lengths))
    return logits


def next_log_probs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    is_read: Tensor,
    *,
    columns: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Compute the log-probs of the tokens after some positions, by the applied passes and in their layout.

    Args:
        model: A causal LM, possibly wrapped.
        input_ids: [B, S] int64, padded on the right.
        attention_mask: [B, S] bool, True = a real token.
        is_read: [B, S] bool, True = compute the log-prob of the next token. False in the last column.
        columns: Name -> [B, ...], inputs of the model from the prompts.

    Returns:
        [B, S] float32 nats, 0 where `is_read` is False.

    Example:
        targets = torch.nn.functional.pad(loss_mask[:, 1:], (0, 1))
        loss = -next_log_probs(model, ids, attention_mask, targets).sum()
    """
    labels = input_ids.roll(-1, 1)[is_read]
    log_probs = label_log_probs(model, input_ids, attention_mask, is_read, labels, columns=columns)
    return torch.zeros_like(is_read, dtype=log_probs.dtype).index_put((is_read,), log_probs)


def label_log_probs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    is_read: Tensor,
    labels: Tensor,
    *,
    columns: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Compute the log-prob of a label at some positions, by the applied passes and in their layout.

    Unlike in `next_log_probs`, the label of a position does not need to be the next token of its row.

    Args:
        model: A causal LM, possibly wrapped.
        input_ids: [B, S] int64, padded on the right.
        attention_mask: [B, S] bool, True = a real token.
        is_read: [B, S] bool, True = compute the log-prob of this position's label.
        labels: [N] int64, for the N True positions of `is_read`.
        columns: Name -> [B, ...], inputs of the model from the prompts.

    Returns:
        [N] float32 nats, at temperature 1.
    """
    inner = innermost(model)
    rows = lay_out(inner, PaddedRows(input_ids, attention_mask, is_read, columns or {}))
    wanted = ActionLabels(labels, 1.0, with_entropy=False, entropy_grad=False)

    def run() -> Tensor:
        return call(model, inner, rows.inputs, rows.logits_to_keep, rows.lengths)

    log_probs, _ = current_passes().log_probs(inner, rows, run, wanted)
    return log_probs


def lay_out(model: nn.Module, rows: PaddedRows) -> Any:
    """Return the rows in the layout of the applied passes, in the order of actions.

    Rows with model inputs other than ids and mask are padded.
    """
    kind = model_kind_of(model)
    rows = replace(rows, kind=kind)
    return rows if rows.columns or kind.inputs_differ else current_passes().lay_out(model, rows)
