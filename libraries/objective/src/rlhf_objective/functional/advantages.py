"""Computes rewards per token, advantages and returns from scores, KL and values.

Everything is computed in float64 and returned as float32; positions under a False mask give 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf_core.episode_view import single_rank
from rlhf_forward.masking import Reduce, last_true_index, masked_sum, var_over_ranks


@dataclass(frozen=True, slots=True)
class AdvantageInput:
    """Input of a named advantage estimator (`rlhf.advantages`): the rows it needs, all unless it says less."""

    rewards: Tensor
    """[B, A] float32 per token: the score on the last action and, where it is penalised there, the KL on each."""
    mask: Tensor
    """[B, A] bool, the action mask."""
    group_ids: Tensor
    """[B] int64, equal for samples of one prompt."""
    scores: Tensor | None = None
    """[B] float32, the score of each row's sample; needed where samples have several rows."""
    sample_ids: Tensor | None = None
    """[B] int64, the episode of each row: equal for rows of one that branched; None where every row is a sample."""
    all_reduce: Reduce = single_rank
    """Adds up float64 sums over the ranks that hold the episode's other rows. Collective."""
    values: Tensor | None = None
    """[B, A] float32, the critic's value of the state before each token; None without a critic."""
    log_probs: Tensor | None = None
    """[B, A] float32 nats, of the policy that sampled, on the distribution it sampled from."""
    trainer_log_probs: Tensor | None = None
    """[B, A] float32 nats, of the trainer's policy at the start of the episode; None where it runs no forward then."""
    reference_log_probs: Tensor | None = None
    """[B, A] float32 nats; None without a reference."""
    named_rewards: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> [B] float32, raw."""
    turn_ids: Tensor | None = None
    """[B, A] int64, the number of each token's turn in its row, from 0; -1 outside the mask. None without an
    environment."""
    greedy_scores: Tensor | None = None
    """[B] float32, the score of the greedy answer to each row's prompt; None where none was made."""

    @property
    def totals(self) -> Tensor:
        """[B] float32: the reward of each row's sample, the KL of all its rows included."""
        sums = masked_sum(self.rewards, self.mask, dim=-1)
        if self.sample_ids is None or self.scores is None:
            return sums
        # Every row carries the score, plus the KL of its own tokens.
        own = sums.double() - self.scores.double()
        return (self.scores.double() + sums_of_samples(own, self.sample_ids)).float()


def sums_of_samples(values: Tensor, sample_ids: Tensor | None) -> Tensor:
    """[B] values per row -> [B] sums over all rows of each row's sample. None: every row is a sample."""
    if sample_ids is None:
        return values
    _, sample = torch.unique(sample_ids, return_inverse=True)
    return torch.zeros_like(values).index_add(0, sample, values)[sample]


@dataclass(frozen=True, slots=True)
class Advantages:
    """Both [B, A] float32, 0 under a False mask."""

    advantages: Tensor
    returns: Tensor
    """advantages + values: the critic's target."""


def token_rewards(
    scores: Tensor,
    kl: Tensor | None,
    kl_coef: float | Tensor,
    action_mask: Tensor,
    turn_rewards: Tensor | None = None,
) -> Tensor:
    """r_t = -kl_coef * kl_t + turn_reward_t + [t is the last True of the mask] * (score - sum of turn rewards).

    scores: [B]; kl: [B, A] nats or None; kl_coef: one number, or [B]; action_mask: [B, A] bool; turn_rewards: [B, A],
    the part of the score that was earned at certain tokens, or None. Returns [B, A] float32; a row without actions
    gets nothing.
    """
    rewards = torch.zeros(action_mask.shape, dtype=torch.float64, device=action_mask.device)
    if kl is not None:
        coefficient = kl_coef.double().unsqueeze(-1) if isinstance(kl_coef, Tensor) else kl_coef
        rewards = torch.where(action_mask, -coefficient * kl.double(), 0.0)
    places = torch.arange(action_mask.shape[-1], device=action_mask.device)
    is_last = places == last_true_index(action_mask).unsqueeze(-1)
    last = scores.double()
    if turn_rewards is not None:
        earned = torch.where(action_mask, turn_rewards.double(), 0.0)
        rewards, last = rewards + earned, last - earned.sum(-1)
    return torch.where(is_last, rewards + last.unsqueeze(-1), rewards).float()


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Advantages:
    """Generalised advantage estimation (Schulman 2015, equation 16).

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t+1 is the next True position
    of the row (what lies between is skipped over) and V after the last one is 0. All inputs [B, A].
    """
    reward_columns = torch.where(mask, rewards, 0.0).double().unbind(-1)
    value_columns = torch.where(mask, values, 0.0).double().unbind(-1)
    mask_columns = mask.unbind(-1)
    next_value = torch.zeros(mask.shape[0], dtype=torch.float64, device=mask.device)
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    for t in reversed(range(mask.shape[-1])):
        real, value = mask_columns[t], value_columns[t]
        delta = reward_columns[t] + gamma * next_value - value
        next_advantage = torch.where(real, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(real, value, next_value)
        advantages[:, t] = torch.where(real, next_advantage, 0.0)
    returns = torch.where(mask, advantages + values, 0.0)
    return Advantages(advantages=advantages.float(), returns=returns.float())


def rewards_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """[B, A]: G_t = r_t + gamma G_{t+1} over the True positions; equals GAE for lam = 1 without a critic."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0).advantages


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, all_reduce: Reduce = single_rank) -> float | None:
    """1 - Var(R - V) / Var(R) over the mask of all ranks: 1 is a perfect critic, 0 a constant one.

    None where the returns do not vary, so that it is undefined.
    """
    returns, values = returns.detach().double(), values.detach().double()
    variance = float(var_over_ranks(returns, mask, all_reduce))
    if variance == 0.0:
        return None
    return 1.0 - float(var_over_ranks(returns - values, mask, all_reduce)) / variance
