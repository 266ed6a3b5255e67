"""Advantage estimators that credit each turn of an environment's episode: float32 [B, A], 0 outside the mask.

In a run without an environment, and for episodes of a single turn, each equals an estimator of the whole answer:
`turn-normalised` and `gigpo` equal `group-normalised`, and `turn-to-go` equals `reward-to-go`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

import rlhf_forward  # loads torch only when it computes, not when options are read
import rlhf_objective as objective
from rlhf_core.errors import RlhfError

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_objective import AdvantageInput, Turns

Fraction = Annotated[float, Field(ge=0, le=1)]
_WHITENING_EPS = 1e-8


@objective.needs("episode", compares_answers=True, credits_turns=True)
def turn_normalised(
    rows: AdvantageInput, *, turn_gamma: Fraction = 1.0, divide_by_std: bool = True, leave_one_out: bool = False
) -> Tensor:
    """(discounted return from a turn on - its mean) / its standard deviation, over the turns of the same number.

    The turns compared are those of the answers to one prompt. A turn that no other answer has gets 0.
    """
    turns = objective.Turns.of(rows)
    advantages = objective.group_normalised(
        turns.returns(turn_gamma),
        _pairs(turns.groups, turns.numbers),
        divide_by_std=divide_by_std,
        leave_one_out=leave_one_out,
    )
    return turns.to_tokens(advantages)


@objective.needs("episode", credits_turns=True)
def turn_to_go(
    rows: AdvantageInput, *, turn_gamma: Fraction = 1.0, whiten_over: Literal["episode", "turn"] = "episode"
) -> Tensor:
    """Sum of the rewards from each token to the end of its turn, plus the discounted return of the next turn, whitened.

    Whitened over all tokens of the training episode, or over the tokens of turns of the same number.
    """
    import torch

    turns = objective.Turns.of(rows)
    returns = turns.returns(turn_gamma)
    # Within a turn, later tokens subtract the rewards of earlier tokens: only the KL penalty differs between them.
    own = torch.where(rows.mask, rows.rewards.double(), 0.0)
    if rows.turn_rewards is not None:
        own = own - torch.where(rows.mask, rows.turn_rewards.double(), 0.0)
    earlier = _sum_before(own, turns.of_token, rows.mask)
    values = torch.where(rows.mask, torch.cat([returns, returns.new_zeros(1)])[turns.of_token] - earlier, 0.0)
    if whiten_over == "episode":
        return rlhf_forward.masked_whiten(values.float(), rows.mask, all_reduce=rows.all_reduce)
    number = torch.cat([turns.numbers, turns.numbers.new_full((1,), -1)])[turns.of_token]
    result = torch.zeros_like(values)
    for each in turns.numbers.unique().tolist():
        chosen = rows.mask & (number == each)
        mean, variance = values[chosen].mean(), values[chosen].var(correction=0)
        result = torch.where(chosen, (values - mean) / (variance + _WHITENING_EPS).sqrt(), result)
    return result.float()


@objective.needs("episode", compares_answers=True, credits_turns=True)
def gigpo(
    rows: AdvantageInput,
    *,
    turn_gamma: Fraction = 0.95,
    step_weight: Annotated[float, Field(ge=0)] = 1.0,
    state: Literal["observation", "history", "environment"] = "observation",
    divide_by_std: bool = True,
    leave_one_out: bool = False,
) -> Tensor:
    """GiGPO: group-normalised reward of the answer + step_weight * normalised return among turns from the same state.

    Feng 2025 (arXiv 2505.10978), equations 3, 6, 7 and 8. The turns compared are those of the answers to one prompt
    whose `state` is equal: the observation before them (the paper's anchor state), the whole conversation before them,
    or the column `turn_state` of the environment. A turn whose state occurs once has only the first term. So does a
    prompt all of whose answers are single turns, because both terms would be equal.
    """
    import torch

    turns = objective.Turns.of(rows)

    def normalised(values: Tensor, groups: Tensor, samples: Tensor | None = None) -> Tensor:
        return objective.group_normalised(
            values, groups, sample_ids=samples, divide_by_std=divide_by_std, leave_one_out=leave_one_out
        ).double()

    advantages = normalised(turns.totals, turns.groups, turns.samples)
    if bool((turns.numbers > 0).any()):
        steps = normalised(turns.returns(turn_gamma), _pairs(turns.groups, _states(turns, state)))
        has_steps = torch.isin(turns.groups, turns.groups[turns.numbers > 0])
        advantages = advantages + torch.where(has_steps, step_weight * steps, 0.0)
    return turns.to_tokens(advantages)


def _states(turns: Turns, kind: str) -> Tensor:
    if kind not in turns.states:
        raise RlhfError(
            "the environment does not report states: its rows lack the column `turn_state`",
            where="algorithm.advantage.state",
            hint="set state to observation or history, or declare the column (docs/algorithms/policy-objective.md)",
        )
    return turns.states[kind]


def _pairs(first: Tensor, second: Tensor) -> Tensor:
    """[T] ids that are equal where both tensors are equal."""
    import torch

    pairs: Tensor = torch.unique(torch.stack([first, second]), dim=1, return_inverse=True)[1]
    return pairs


def _sum_before(values: Tensor, of_token: Tensor, mask: Tensor) -> Tensor:
    """[B, A] sum of the values of earlier tokens of the same turn."""
    import torch

    before = values.cumsum(-1) - values
    is_start = mask & (of_token != torch.nn.functional.pad(of_token, (1, 0), value=-1)[:, :-1])
    places = torch.arange(values.shape[-1]).expand_as(values)
    start = torch.where(is_start, places, 0).cummax(-1).values  # of each token's turn
    return torch.where(mask, before - before.gather(-1, start), 0.0)
