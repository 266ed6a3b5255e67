"""Turns of an environment in an episode's rows: rewards, numbers, and states before each turn."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf_core.episode_view import EpisodeView
from rlhf_forward.masking import turn_ids

if TYPE_CHECKING:
    from rlhf_core.types import Experience

_REWARDS, _NUMBER, _STATE = "turn_rewards", "turn_number", "turn_state"
"""Columns per token: raw rewards of turns (core), number of the turn (the section `environment`), and state before the
turn (an environment that declares it)."""
_HASH_BYTES = 8


def has_turns(episode: Experience) -> bool:
    """Whether the rows come from an environment.

    Args:
        episode: Rows of an episode.
    """
    return _REWARDS in episode.columns


def earned_in_turns(episode: Experience, view: EpisodeView) -> Tensor:
    """Return the weighted part of the scores that turns earned.

    Args:
        episode: Rows with turns (`has_turns`).
        view: The whole episode.

    Returns:
        [R, A] float32, at the last token of each turn.
    """
    rewards: Tensor = episode.columns[_REWARDS]  # [R, A, rewards], raw
    return rewards @ torch.tensor([view.weights.get(name, 1.0) for name in episode.rewards])


def turn_inputs(episode: Experience, view: EpisodeView) -> dict[str, Any]:
    """Return the fields of `AdvantageInput` for estimators that credit turns.

    Args:
        episode: Rows with turns (`has_turns`).
        view: The whole episode.
    """
    numbers = _numbers(episode)
    states = _states(episode, numbers)
    if _STATE in episode.columns:
        states["environment"] = episode.columns[_STATE].long()
    earned = torch.where(episode.action_mask, earned_in_turns(episode, view), 0.0)
    return {"turn_numbers": numbers, "turn_rewards": earned, "turn_states": states}


def _numbers(episode: Experience) -> Tensor:
    """[R, A] int64: number of each token's turn in its sample, -1 outside the mask.

    Turns of a player that does not number them are runs of the mask, counted branch after branch.
    """
    if _NUMBER in episode.columns:
        return torch.where(episode.action_mask, episode.columns[_NUMBER].long(), -1)
    of_row = turn_ids(episode.action_mask)
    if episode.branches is None:
        return of_row
    counts = of_row.amax(-1) + 1
    before, earlier = torch.zeros_like(counts), 0
    for row in range(1, len(episode)):  # sorted by sample and branch
        is_next = bool(episode.sample_ids[row] == episode.sample_ids[row - 1])
        earlier = earlier + int(counts[row - 1]) if is_next else 0
        before[row] = earlier
    return torch.where(episode.action_mask, of_row + before.unsqueeze(-1), -1)


def _states(episode: Experience, numbers: Tensor) -> dict[str, Tensor]:
    """Return `observation` and `history` of `AdvantageInput.turn_states`: hashes of token ids, [R, A] int64."""
    states = {kind: torch.zeros_like(numbers) for kind in ("observation", "history")}
    start_of_response = episode.prompt_length
    for row in range(len(episode)):
        ids = episode.sequences[row]
        first = int(episode.attention_mask[row].long().argmax())  # prompts are padded on the left
        own = numbers[row]
        end = first  # index in `ids` after the last turn
        for place in _starts(own).tolist():
            start = start_of_response + place
            turn = (own == own[place]) & (torch.arange(own.numel()) >= place)
            states["observation"][row, turn] = _hash(ids[end:start])
            states["history"][row, turn] = _hash(ids[first:start])
            end = start_of_response + int(turn.nonzero()[-1]) + 1
    return states


def _starts(numbers: Tensor) -> Tensor:
    """Return the indices of first tokens of turns in a row."""
    before = torch.nn.functional.pad(numbers, (1, 0), value=-1)[:-1]
    return ((numbers >= 0) & (numbers != before)).nonzero()[:, 0]


def _hash(ids: Tensor) -> int:
    """Return a hash of token ids. Same on every machine, unlike Python's."""
    digest = blake2b(ids.long().cpu().numpy().astype("<i8").tobytes(), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest, "little", signed=True)
