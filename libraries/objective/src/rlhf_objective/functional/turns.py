"""Turns of an episode's samples: their rewards, discounted returns and states.

Everything is computed in float64. Only `to_tokens` returns float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_forward.masking import last_true_index, masked_sum

from .advantages import AdvantageInput, sums_of_samples


@dataclass(frozen=True, slots=True)
class Turns:
    """All T turns of the rows of an `AdvantageInput`, sorted by sample and number. Branches of a sample are joined.

    Without an environment each row is a single turn.

    Example:
        >>> rewards, numbers = torch.tensor([[0.0, 1.0, 0.0, 2.0]]), torch.tensor([[0, 0, -1, 1]])
        >>> rows = AdvantageInput(rewards, numbers >= 0, torch.tensor([0]), turn_numbers=numbers)
        >>> turns = Turns.of(rows)
        >>> turns.returns(turn_gamma=0.5)  # 1 + 0.5 * 2, then 2
        tensor([2., 2.], dtype=torch.float64)
        >>> turns.to_tokens(turns.rewards)
        tensor([[1., 1., 0., 2.]])
    """

    samples: Tensor
    """[T] int64, the sample of each turn: its id, or the index of its row if every row is a sample."""
    groups: Tensor
    """[T] int64, equal for turns of samples of one prompt."""
    numbers: Tensor
    """[T] int64, number of the turn in its sample, from 0."""
    rewards: Tensor
    """[T] float64, reward of the turn with the KL of its tokens. The last turn also has the part of the sample's score
    that is not a turn's reward, so that the turns of a sample add up to its total."""
    totals: Tensor
    """[T] float64, total reward of the turn's sample."""
    states: Mapping[str, Tensor]
    """Kind of state -> [T] int64 (`AdvantageInput.turn_states`)."""
    of_token: Tensor
    """[B, A] int64, index of the turn that a token belongs to, -1 outside the mask."""

    @classmethod
    def of(cls, rows: AdvantageInput) -> Turns:
        """Collect the turns.

        Args:
            rows: Rows of an estimator that declares `credits_turns`, with all rows of each sample.
        """
        mask = rows.mask
        numbers = torch.zeros_like(mask, dtype=torch.int64) if rows.turn_numbers is None else rows.turn_numbers
        ids = torch.arange(len(mask)) if rows.sample_ids is None else rows.sample_ids
        _, sample_of_row = torch.unique(ids, return_inverse=True)
        width = int(numbers.max()) + 1 if numbers.numel() else 1
        keys = (sample_of_row.unsqueeze(-1) * width + numbers)[mask]
        found, turn = torch.unique(keys, return_inverse=True)
        of_token = torch.full(mask.shape, -1, dtype=torch.int64).masked_scatter(mask, turn)
        row_of_token = torch.arange(len(mask)).unsqueeze(-1).expand_as(mask)[mask]

        def per_turn(values: Tensor) -> Tensor:
            """[tokens under the mask] -> [T], equal for all tokens of a turn."""
            return torch.zeros(len(found), dtype=values.dtype).scatter(0, turn, values)

        rewards = torch.zeros(len(found), dtype=torch.float64)
        rewards = rewards.index_add(0, turn, rows.rewards[mask].double())
        row_of_turn = per_turn(row_of_token)
        samples = ids[row_of_turn]
        if rows.sample_ids is not None and rows.scores is not None:
            rewards = rewards + _moved_to_last_turn(rows, of_token, samples, row_of_turn)
        totals = sums_of_samples(rewards, samples)
        states = {kind: per_turn(values[mask]) for kind, values in rows.turn_states.items()}
        return cls(samples, rows.group_ids[row_of_turn], found % width, rewards, totals, states, of_token)

    def returns(self, turn_gamma: float) -> Tensor:
        """[T] float64: G_k = r_k + turn_gamma * G_{k+1} over the turns of a sample.

        Args:
            turn_gamma: Discount factor per turn.
        """
        found: list[float] = []
        later = 0.0
        next_sample: int | None = None
        for sample, reward in zip(reversed(self.samples.tolist()), reversed(self.rewards.tolist()), strict=True):
            later = reward + (turn_gamma * later if sample == next_sample else 0.0)
            next_sample = sample
            found.append(later)
        return torch.tensor(found[::-1], dtype=torch.float64)

    def to_tokens(self, values: Tensor) -> Tensor:
        """[T] values -> [B, A] float32, the value of each token's turn, 0 outside the mask.

        Args:
            values: [T] float.
        """
        return torch.cat([values.double(), values.new_zeros(1).double()])[self.of_token].float()


def _moved_to_last_turn(rows: AdvantageInput, of_token: Tensor, samples: Tensor, row_of_turn: Tensor) -> Tensor:
    """[T] float64 correction of turn rewards for samples of several rows.

    The rewards of each row contain the sample's whole score: the rewards of the row's turns, and the rest on its last
    token. Instead, only the last turn of the sample gets the rest, without the rewards of turns in all rows.
    """
    assert rows.scores is not None
    scores = rows.scores.double()
    earned = torch.zeros_like(scores)
    if rows.turn_rewards is not None:
        earned = masked_sum(rows.turn_rewards.double(), rows.mask, dim=-1)
    change = torch.zeros(len(samples), dtype=torch.float64)
    has_turns = rows.mask.any(-1)
    last_of_row = of_token.gather(1, last_true_index(rows.mask).clamp(min=0).unsqueeze(-1))[:, 0]
    change = change.index_add(0, last_of_row[has_turns], (earned - scores)[has_turns])
    is_last = torch.cat([samples[1:] != samples[:-1], samples.new_ones(1, dtype=torch.bool)])[: len(samples)]
    left = scores - sums_of_samples(earned, rows.sample_ids)
    return torch.where(is_last, change + left[row_of_turn], change)
