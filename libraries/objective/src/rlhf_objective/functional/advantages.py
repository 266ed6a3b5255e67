"""Rewards per token, advantages and returns from scores, KL and values.

Everything is computed in float64 and returned as float32. Results under a False mask are 0.
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
    """Input of a named advantage estimator (`rlhf.advantages`): all rows, or those that it `needs`."""

    rewards: Tensor
    """[B, A] float32 per token: the score on the last action and, if it is penalized in the reward, the KL on each."""
    mask: Tensor
    """[B, A] bool, the action mask."""
    group_ids: Tensor
    """[B] int64, equal for samples of one prompt."""
    scores: Tensor | None = None
    """[B] float32, the score of each row's sample. Required if samples have several rows."""
    sample_ids: Tensor | None = None
    """[B] int64, the sample of each row, equal for branches of one episode. None if every row is a sample."""
    all_reduce: Reduce = single_rank
    """Sums float64 tensors over the ranks that hold the episode's other rows. Collective."""
    values: Tensor | None = None
    """[B, A] float32, the critic's value of the state before each token. None without a critic."""
    log_probs: Tensor | None = None
    """[B, A] float32 nats, under the policy that sampled, on the distribution that it sampled from."""
    trainer_log_probs: Tensor | None = None
    """[B, A] float32 nats, under the trainer's policy at the start of the episode. None if it does not run then."""
    reference_log_probs: Tensor | None = None
    """[B, A] float32 nats. None without a reference."""
    named_rewards: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> [B] float32, raw."""
    turn_ids: Tensor | None = None
    """[B, A] int64, index of each token's turn in its row, -1 outside the mask. None without an environment."""
    turn_numbers: Tensor | None = None
    """[B, A] int64, number of each token's turn in its sample, from 0, in the order of sampling over all its rows. -1
    outside the mask. None without an environment, or if the estimator does not declare `credits_turns`."""
    turn_rewards: Tensor | None = None
    """[B, A] float32, the part of `rewards` that turns earned, at the last token of each. None like `turn_numbers`."""
    turn_states: Mapping[str, Tensor] = field(default_factory=dict)
    """Kind of state -> [B, A] int64, equal for tokens of turns that start from the same state. `observation`: tokens
    that the policy has received since its last turn. `history`: all tokens before the turn. `environment`: the column
    `turn_state` of an environment that declares it. Empty like `turn_numbers`."""
    greedy_scores: Tensor | None = None
    """[B] float32, the score of the greedy answer to each row's prompt. None without greedy answers."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Column -> its values: [B, A, ...] per token, [B, ...] per sample. Includes those of the passes that the estimator
    declares (`rlhf_objective.uses_pass`)."""

    @property
    def totals(self) -> Tensor:
        """[B] float32: the reward of each row's sample, including the KL of all its rows."""
        sums = masked_sum(self.rewards, self.mask, dim=-1)
        if self.sample_ids is None or self.scores is None:
            return sums
        # The rewards of each row contain the sample's score plus the KL of the row's own tokens.
        own = sums.double() - self.scores.double()
        return (self.scores.double() + sums_of_samples(own, self.sample_ids)).float()


def sums_of_samples(values: Tensor, sample_ids: Tensor | None) -> Tensor:
    """[B] values per row -> [B] sums over all rows of the row's sample. `sample_ids` None: every row is a sample."""
    if sample_ids is None:
        return values
    _, sample = torch.unique(sample_ids, return_inverse=True)
    return torch.zeros_like(values).index_add(0, sample, values)[sample]


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages and returns, both [B, A] float32, 0 under a False mask."""

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

    Args:
        scores: [B] float, the score of each sample.
        kl: [B, A] nats. None without a KL penalty in the reward.
        kl_coef: One number, or [B].
        action_mask: [B, A] bool.
        turn_rewards: [B, A], the part of the score that was earned at certain tokens. None if there are no such parts.

    Returns:
        [B, A] float32. A row without actions has only zeros.

    Example:
        >>> kl, mask = torch.tensor([[0.1, 0.2, 0.3]]), torch.tensor([[True, True, False]])
        >>> token_rewards(torch.tensor([1.0]), kl, 0.5, mask)  # -0.5 * 0.1, then 1 - 0.5 * 0.2
        tensor([[-0.0500,  0.9000,  0.0000]])
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


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor) -> Advantages:
    """Generalized advantage estimation (Schulman 2015, equation 16).

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, in which t+1 is the next True position of
    the row (positions between are skipped), and V after the last one is 0.

    Args:
        rewards, values: [B, A] float.
        mask: [B, A] bool.
        gamma: Discount.
        lam: Decay of later deltas, one number or [B].

    Returns:
        Advantages, and returns (advantages + values).

    Example:
        >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.full((1, 3), 0.5)  # deltas 0, 0, 0.5
        >>> gae(rewards, values, rewards >= 0, gamma=1.0, lam=0.5).advantages
        tensor([[0.1250, 0.2500, 0.5000]])
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
    """Discounted sum of rewards, G_t = r_t + gamma G_{t+1} over the True positions: GAE with lam = 1 and no critic.

    Args:
        rewards: [B, A] float.
        mask: [B, A] bool.
        gamma: Discount.

    Returns:
        [B, A] float32.

    Example:
        >>> rewards_to_go(torch.tensor([[0.0, 0.0, 1.0]]), torch.ones(1, 3, dtype=torch.bool), gamma=0.5)
        tensor([[0.2500, 0.5000, 1.0000]])
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0).advantages


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, all_reduce: Reduce = single_rank) -> float | None:
    """1 - Var(R - V) / Var(R) over the mask of all ranks: 1 for a perfect critic, 0 for a constant one.

    Args:
        values, returns: [B, A] float, V and R.
        mask: [B, A] bool.
        all_reduce: Sums over ranks. Collective.

    Returns:
        The fraction, or None if the returns do not vary.

    Example:
        >>> mask = torch.ones(1, 3, dtype=torch.bool)
        >>> explained_variance(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[2.0, 3.0, 5.0]]), mask)  # V off by 1
        1.0
    """
    returns, values = returns.detach().double(), values.detach().double()
    variance = float(var_over_ranks(returns, mask, all_reduce))
    if variance == 0.0:
        return None
    return 1.0 - float(var_over_ranks(returns - values, mask, all_reduce)) / variance
