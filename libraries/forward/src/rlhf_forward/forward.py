"""One forward pass of a policy or a critic over an `Experience`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf_core.columns import TEMPERATURE

from .logits import call, innermost, lay_out
from .logprobs import Temperature, scaled_logits
from .padded_passes import ActionLabels, current_passes, plain_log_probs
from .row_lengths import length_switches, own_lengths
from .rows import PaddedRows, with_own_prefixes
from .shaping import is_shaped, shaped_actions

if TYPE_CHECKING:
    from rlhf_core.types import Experience


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """Values per response token, under the sampling distribution, 0 where `action_mask` is False."""

    log_probs: Tensor
    """[B, A] float32 nats."""
    entropy: Tensor | None
    """[B, A] float32 nats."""
    read: Tensor | None = None
    """[B, A, ...]: results of the function `read`."""


def policy_forward(
    model: nn.Module,
    experience: Experience,
    temperature: float,
    *,
    with_entropy: bool = False,
    entropy_grad: bool = True,
    read: Callable[[Tensor], Tensor] | None = None,
) -> PolicyOutput:
    """Compute log-probs (and entropy) of an experience's response tokens under a transformers causal LM.

    Logits are computed for the response only, if the model supports it, and the softmax for actions only.

    Args:
        model: The policy, possibly wrapped (DDP, a booster, PEFT). It receives the arguments that its innermost module
            accepts.
        experience: A batch on the model's device.
        temperature: Sampling temperature of the run. Tokens with a value in the column `temperature` use that instead.
        with_entropy: Whether to compute the entropy.
        entropy_grad: Whether the entropy has a gradient. False is for logging, and saves memory.
        read: Computes further values, [N, ...], from the logits of the N actions, [N, V] float32, with penalties and
            divided by the temperature, without truncation to a support.

    Returns:
        Values per response token, 0 where `action_mask` is False.

    Example:
        output = policy_forward(models["policy"], batch, temperature=1.0, with_entropy=True)
        ratio = (output.log_probs - batch.action_log_probs).exp()
    """
    inner = innermost(model)
    rows, mask = model_rows(inner, experience), experience.action_mask
    labels = experience.sequences[:, experience.prompt_length :][mask]
    at = _temperature(experience, temperature)
    values: Tensor | None = None

    def run() -> Tensor:
        return call(model, inner, rows.inputs, rows.logits_to_keep, rows.lengths)

    wanted = ActionLabels(labels, at, with_entropy, entropy_grad)
    if read is None and experience.support_ids is None and not is_shaped(experience):
        log_probs, entropies = current_passes().log_probs(inner, rows, run, wanted)
    else:
        logits = shaped_actions(inner, rows.of_actions(run()), experience)
        support = None if experience.support_ids is None else experience.support_ids[mask]
        log_probs, entropies = plain_log_probs(logits, wanted, support)
        if read is not None:
            values = read(scaled_logits(logits, at))
    return PolicyOutput(
        log_probs=_scatter(log_probs, mask),
        entropy=_scatter(entropies, mask) if with_entropy and entropies is not None else None,
        read=None if values is None else _scatter(values, mask),
    )


def _temperature(experience: Experience, temperature: float) -> Temperature:
    """The run's temperature, or [N, 1] float32 with the temperature of each action."""
    sampled_at: Tensor | None = experience.columns.get(TEMPERATURE)
    if sampled_at is None:
        return temperature
    return torch.where(sampled_at > 0, sampled_at, temperature)[experience.action_mask].unsqueeze(-1)


def value_forward(critic: nn.Module, experience: Experience) -> Tensor:
    """Compute a critic's value of the state before each response token.

    Args:
        critic: Called as `critic(input_ids, attention_mask, position_ids)`, with the model inputs of the prompts.
            Returns a value per token, [B, S]. If its attribute `takes_packed_rows` is true, it also receives `packing`
            for its trunk (`rlhf_passes`).
        experience: A batch on the critic's device.

    Returns:
        [B, A] float32, 0 where `action_mask` is False.
    """
    inner = innermost(critic)
    rows = model_rows(inner, experience)
    with own_lengths(inner, rows.lengths):
        values = critic(**rows.inputs)
    return _scatter(rows.of_actions(values).float(), experience.action_mask)


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """[number of True, ...] -> [B, A, ...], 0 under a False mask. Has a gradient even if the mask is empty."""
    zeros = torch.zeros(*mask.shape, *values.shape[1:], dtype=values.dtype, device=values.device)
    return zeros.index_put((mask,), values)


def model_rows(model: nn.Module, experience: Experience) -> Any:
    """Return the experience's rows for the innermost `model`, each action with its own prefix (see `lay_out`)."""
    return lay_out(model, with_own_prefixes(PaddedRows.of(experience), length_switches(model) or ()))
