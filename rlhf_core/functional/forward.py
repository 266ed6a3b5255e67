"""One forward pass of a policy or a critic over an `Experience`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    logits = causal_lm_logits(
        model,
        experience.sequences,
        experience.attention_mask,
        logits_to_keep=num_actions + 1,
        signature_of=signature_of,
    )
    logits = response_logits(logits, num_actions)[mask]
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
    num_actions = experience.num_actions
    labels = experience.sequences[:, experience.prompt_length :]
    with lean_head(inner, labels, experience.action_mask, temperature, with_entropy=with_entropy):
        packed = causal_lm_logits(
            model,
            experience.sequences,
            experience.attention_mask,
            logits_to_keep=num_actions + 1,
            signature_of=inner,
        )
    log_probs, entropies = packed[:, :num_actions].float().unbind(-1)
    if not with_entropy:
        return PolicyOutput(log_probs, None)
    return PolicyOutput(log_probs, entropies if entropy_grad else entropies.detach())


def value_forward(critic: nn.Module, experience: Experience) -> Tensor:
    """[B, A] float32: the critic's value of the state before each response token, 0 where no action is.

    `critic(input_ids, attention_mask, position_ids)` returns a value per token, [B, S].
    """
    values = critic(
        input_ids=experience.sequences,
        attention_mask=experience.attention_mask.long(),
        position_ids=position_ids_of(experience.attention_mask),
    )
    read = response_values(values, experience.num_actions).float()
    return torch.where(experience.action_mask, read, 0.0)


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
