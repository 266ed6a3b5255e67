"""Tokens that a policy loss selects from a whole episode (`rlhf_objective.marks`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

from rlhf_core.columns import Column, Columns
from rlhf_core.episode_view import EpisodeView
from rlhf_core.types import Experience
from rlhf_forward import uniforms

from . import EpisodeTokens

if TYPE_CHECKING:
    from torch import Tensor

MARKS = "marks"
"""Column [A], True on the tokens that the policy loss has selected."""
COLUMNS: Mapping[str, Column] = {MARKS: Column(dtype="bool")}
_DRAWS = 0x436F76
"""Seed of the noise of `EpisodeTokens`. A constant is enough, since sample ids are unique in a run."""


def with_marks(episode: Experience, loss: Callable[..., Any], view: EpisodeView) -> Experience:
    """Return the rows with the marks of a bound policy loss, or unchanged if it selects none. Collective."""
    choose = getattr(loss, "choose", None)
    if choose is None:
        return episode
    parameters = signature(choose).parameters
    options = {name: value for name, value in getattr(loss, "keywords", {}).items() if name in parameters}
    chosen = choose(_tokens(episode, view), **options)
    marked = Columns({MARKS: chosen & episode.action_mask}, COLUMNS)
    return replace(episode, columns=episode.columns | marked)


def _tokens(rows: Experience, view: EpisodeView) -> EpisodeTokens:
    """Return the tokens from which a loss selects, with their advantages. Collective."""
    import torch

    assert rows.advantages is not None
    mask = rows.action_mask
    old = rows.action_log_probs if rows.trainer_log_probs is None else rows.trainer_log_probs
    places = torch.arange(mask.shape[-1], device=mask.device)
    branches = 0 if rows.branches is None else rows.branches.unsqueeze(-1)
    lengths = view.gather(mask.sum(-1)).long()
    firsts = view.local(lengths.cumsum(0) - lengths).unsqueeze(-1)
    index = (firsts + mask.long().cumsum(-1) - 1)[mask]

    def all_tokens(values: Tensor) -> Tensor:
        placed = torch.zeros(int(lengths.sum()), dtype=torch.float64, device=mask.device)
        placed[index] = values[mask].double()
        return view.all_reduce(placed)

    return EpisodeTokens(
        log_probs=torch.where(mask, old, 0.0),
        advantages=torch.where(mask, rows.advantages, 0.0),
        mask=mask,
        draws=uniforms(_DRAWS, rows.sample_ids.unsqueeze(-1), (branches << 32) + places),
        all_tokens=all_tokens,
    )
