"""One forward pass of a policy or a critic over an `Experience`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .lean_head import can_be_lean, lean_head
from .logprobs import entropy, response_logits, response_values, token_log_probs
from .masking import position_ids_of

if TYPE_CHECKING:
    from ..types import Experience


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """Of each response token, on the sampling distribution; 0 where `action_mask` is False."""

    log_probs: Tensor
    """[B, A] float32 nats."""
    entropy: Tensor | None
    """[B, A] float32 nats."""


def policy_forward(
    model: nn.Module,
    experience: Experience,
    temperature: float,
    *,
    with_entropy: bool = False,
    entropy_grad: bool = True,
    signature_of: nn.Module | None = None,
) -> PolicyOutput:
    """Log-probs (and entropy) of the experience's response tokens under a transformers causal LM.

    The model may be wrapped (DDP, a booster, PEFT): which arguments its forward takes is read from the module
    inside, or from `signature_of`. Logits are computed for the response only where the model can, and the softmax
    is taken on action positions only. Without `entropy_grad` the entropy is a number to log: no graph keeps the
    distributions that it was computed from.
    """
    num_actions, mask = experience.num_actions, experience.action_mask
    inner = innermost(signature_of if signature_of is not None else model)
    if experience.support_ids is None and can_be_lean(inner, mask.numel()):
        return _lean_forward(model, inner, experience, temperature, with_entropy, entropy_grad)
    rows = aligned_at_end(experience)
    logits = causal_lm_logits(
        model, rows.sequences, rows.attention_mask, logits_to_keep=num_actions + 1, signature_of=signature_of
    )
    logits = response_logits(logits, num_actions)[rows.action_mask]
    labels = experience.sequences[:, experience.prompt_length :][mask]
    support = None if experience.support_ids is None else experience.support_ids[mask]
    log_probs = _scatter(token_log_probs(logits, labels, temperature, support), mask)
    entropies = None
    if with_entropy:
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropies = _scatter(entropy(logits, temperature, support), mask)
    return PolicyOutput(log_probs=log_probs, entropy=entropies)


def _lean_forward(
    model: nn.Module,
    inner: nn.Module,
    experience: Experience,
    temperature: float,
    with_entropy: bool,
    entropy_grad: bool,
) -> PolicyOutput:
    """The same numbers in chunks over tokens: for large vocabularies, whose logits would not fit."""
    num_actions, mask = experience.num_actions, experience.action_mask
    rows = aligned_at_end(experience)
    labels = rows.sequences[:, rows.sequences.shape[1] - num_actions :]
    with lean_head(inner, labels, rows.action_mask, temperature, with_entropy=with_entropy):
        packed = causal_lm_logits(
            model, rows.sequences, rows.attention_mask, logits_to_keep=num_actions + 1, signature_of=inner
        )
    log_probs, entropies = packed[:, :num_actions][rows.action_mask].float().unbind(-1)
    if not with_entropy:
        return PolicyOutput(_scatter(log_probs, mask), None)
    return PolicyOutput(_scatter(log_probs, mask), _scatter(entropies if entropy_grad else entropies.detach(), mask))


def value_forward(critic: nn.Module, experience: Experience) -> Tensor:
    """[B, A] float32: the critic's value of the state before each response token, 0 where no action is.

    `critic(input_ids, attention_mask, position_ids)` returns a value per token, [B, S].
    """
    rows = aligned_at_end(experience)
    values = critic(
        input_ids=rows.sequences,
        attention_mask=rows.attention_mask.long(),
        position_ids=position_ids_of(rows.attention_mask),
    )
    read = response_values(values, experience.num_actions)[rows.action_mask].float()
    return _scatter(read, experience.action_mask)


def causal_lm_logits(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    logits_to_keep: int | None = None,
    signature_of: nn.Module | None = None,
) -> Tensor:
    """[B, S, V]: logits of padded sequences ([B, S] int64 and bool), padded on either side.

    With `logits_to_keep`, of the last so many positions only, from a model that can; from another, of all.
    """
    takes = inspect.signature(innermost(signature_of if signature_of is not None else model).forward).parameters
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask.long()}
    if "position_ids" in takes:
        inputs["position_ids"] = position_ids_of(attention_mask)
    if "logits_to_keep" in takes and logits_to_keep is not None:
        inputs["logits_to_keep"] = logits_to_keep
    if "use_cache" in takes:
        inputs["use_cache"] = False
    return _logits(model(**inputs))


class AlignedRows(NamedTuple):
    """An experience's rows as a model is given them, as wide as the longest of them."""

    sequences: Tensor
    """[B, W] int64."""
    attention_mask: Tensor
    """[B, W] bool."""
    action_mask: Tensor
    """[B, A] bool over the last A columns. What it picks comes in the same order as under the experience's own."""


def aligned_at_end(experience: Experience) -> AlignedRows:
    """Shift every row to the right until it ends in the last column, and drop the columns nobody needs.

    An experience is as wide as its longest prompt and its longest response together, which need not be of one row:
    short prompts with long answers beside long prompts with short ones would be padding by half.
    """
    sequences, attention_mask, action_mask = experience.sequences, experience.attention_mask, experience.action_mask
    width, longest = sequences.shape[1], int(attention_mask.sum(1).max())
    if longest == width:
        return AlignedRows(sequences, attention_mask, action_mask)
    behind = experience.num_actions - attention_mask[:, experience.prompt_length :].sum(1, keepdim=True)

    def shifted(values: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """The columns from `first` on, and which of them were there before."""
        source = torch.arange(first, values.shape[1], device=values.device) - behind
        return values.gather(1, source.clamp(min=0)), source >= 0

    ids, _ = shifted(sequences, width - longest)
    attended, is_attended = shifted(attention_mask, width - longest)
    acted, is_action = shifted(action_mask, 0)
    return AlignedRows(ids, attended & is_attended, acted & is_action)


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
    """[number of True] -> the mask's shape, 0 elsewhere; with gradient, also when nothing is True."""
    zeros = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
    return zeros.index_put((mask,), values)
