"""One forward pass of a policy or a critic over an `Experience`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf_core.columns import TEMPERATURE
from rlhf_core.models.kinds import model_kind_of

from .logprobs import Temperature, scaled_logits
from .padded_passes import ActionLabels, current_passes, plain_log_probs
from .row_lengths import length_switches, own_lengths
from .rows import PaddedRows, with_own_prefixes

if TYPE_CHECKING:
    from rlhf_core.types import Experience


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """Values per response token, on the sampling distribution; 0 where `action_mask` is False."""

    log_probs: Tensor
    """[B, A] float32 nats."""
    entropy: Tensor | None
    """[B, A] float32 nats."""
    read: Tensor | None = None
    """[B, A, ...]: what `read` took from the logits."""


def policy_forward(
    model: nn.Module,
    experience: Experience,
    temperature: float,
    *,
    with_entropy: bool = False,
    entropy_grad: bool = True,
    read: Callable[[Tensor], Tensor] | None = None,
) -> PolicyOutput:
    """Log-probs (and entropy) of the experience's response tokens under a transformers causal LM.

    temperature: of the run; tokens with another one in the column `temperature` are read at that.

    The model may be wrapped (DDP, a booster, PEFT): its forward's arguments are read from the innermost module.
    Logits are computed for the response only, where the model supports it, and the softmax on
    action positions only. Without `entropy_grad` the entropy is only for logging, and no graph keeps its
    distributions. `read` takes what else is wanted, [N, ...], from the logits at the N action positions, [N, V]
    float32 and divided by the temperature; no support is applied to them.
    """
    inner = innermost(model)
    rows, mask = model_rows(inner, experience), experience.action_mask
    labels = experience.sequences[:, experience.prompt_length :][mask]
    at = _temperature(experience, temperature)
    others: Tensor | None = None

    def run() -> Tensor:
        return _call(model, inner, rows.inputs, rows.logits_to_keep, rows.lengths)

    wanted = ActionLabels(labels, at, with_entropy, entropy_grad)
    if read is None and experience.support_ids is None:
        log_probs, entropies = current_passes().log_probs(inner, rows, run, wanted)
    else:
        logits = rows.of_actions(run())
        support = None if experience.support_ids is None else experience.support_ids[mask]
        log_probs, entropies = plain_log_probs(logits, wanted, support)
        if read is not None:
            others = read(scaled_logits(logits, at))
    return PolicyOutput(
        log_probs=_scatter(log_probs, mask),
        entropy=_scatter(entropies, mask) if with_entropy and entropies is not None else None,
        read=None if others is None else _scatter(others, mask),
    )


def _temperature(experience: Experience, temperature: float) -> Temperature:
    """The run's, or [N, 1] float32 with that of each action."""
    own: Tensor | None = experience.columns.get(TEMPERATURE)
    if own is None:
        return temperature
    return torch.where(own > 0, own, temperature)[experience.action_mask].unsqueeze(-1)


def value_forward(critic: nn.Module, experience: Experience) -> Tensor:
    """[B, A] float32: the critic's value of the state before each response token, 0 at positions without action.

    `critic(input_ids, attention_mask, position_ids)` returns a value per token, [B, S]. One whose attribute
    `takes_packed_rows` is true is given `packing` too, for its trunk (`rlhf_passes`); any is given the model inputs.
    """
    inner = innermost(critic)
    rows = model_rows(inner, experience)
    with own_lengths(inner, rows.lengths):
        values = critic(**rows.inputs)
    return _scatter(rows.of_actions(values).float(), experience.action_mask)


def causal_lm_logits(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    logits_to_keep: int | None = None,
) -> Tensor:
    """[B, S, V]: logits of padded sequences ([B, S] int64 and bool), padded on either side.

    With `logits_to_keep`, only for that many last positions, where the model supports it; otherwise for all.
    """
    inner = innermost(model)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask.long()}
    inputs |= model_kind_of(inner).inputs(input_ids, attention_mask, {})
    return _call(model, inner, inputs, logits_to_keep, attention_mask.sum(1, keepdim=True))


def _call(
    model: nn.Module,
    inner: nn.Module,
    inputs: Mapping[str, Any],
    logits_to_keep: int | Tensor | None,
    lengths: Tensor,
) -> Tensor:
    """The logits for `inputs`, without arguments that the innermost model does not accept.

    lengths: [B, 1] or [B, S] int64, tokens of the row that each position belongs to.
    """
    takes = inspect.signature(inner.forward).parameters
    known = {name: value for name, value in inputs.items() if name != "position_ids" or name in takes}
    if "logits_to_keep" in takes and logits_to_keep is not None:
        known["logits_to_keep"] = logits_to_keep
    if "use_cache" in takes:
        known["use_cache"] = False
    with own_lengths(inner, lengths):
        return _logits(model(**known))


def innermost(module: nn.Module) -> nn.Module:
    """The model inside wrappers: DDP and boosters (`module`), `torch.compile`, PEFT."""
    while True:
        if callable(base := getattr(module, "get_base_model", None)):
            inner: Any = base()
        else:
            inner = getattr(module, "_orig_mod", None) or getattr(module, "module", None)
        if not isinstance(inner, nn.Module) or inner is module:
            return module
        module = inner


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(f"a policy's forward must return an object with `logits`, got {type(output).__name__}")
    return logits


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """[number of True, ...] -> the mask's shape (and the rest), 0 elsewhere; with gradient, also if nothing is True."""
    zeros = torch.zeros(*mask.shape, *values.shape[1:], dtype=values.dtype, device=values.device)
    return zeros.index_put((mask,), values)


def token_logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, is_read: Tensor) -> Tensor:
    """[N, V]: logits at the N True positions of `is_read`, in the layout of the applied passes.

    input_ids: [B, S] int64, padded on the right; attention_mask, is_read: [B, S] bool.
    """
    inner = innermost(model)
    rows = _laid_out(inner, PaddedRows(input_ids, attention_mask, is_read))
    logits: Tensor = rows.of_actions(_call(model, inner, rows.inputs, rows.logits_to_keep, rows.lengths))
    return logits


def model_rows(model: nn.Module, experience: Experience) -> Any:
    """The experience's rows for the innermost `model`, each action with its own prefix; see `_laid_out`."""
    return _laid_out(model, with_own_prefixes(PaddedRows.of(experience), length_switches(model) or ()))


def _laid_out(model: nn.Module, rows: PaddedRows) -> Any:
    """The rows as the applied passes lay them out, in the order of actions.

    With model inputs besides ids and mask they are padded.
    """
    kind = model_kind_of(model)
    rows = replace(rows, kind=kind)
    return rows if rows.columns or kind.inputs_differ else current_passes().lay_out(model, rows)
