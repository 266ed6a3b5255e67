"""Advantages of a rank's rows, from a named estimator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import rlhf_forward
import rlhf_objective as objective
from rlhf_core.episode_view import EpisodeView
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_forward.masking import turn_ids

from .declarations import credits_turns, needs_greedy_answer, needs_of
from .penalties import KL_PENALTY
from .turn_inputs import has_turns, turn_inputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlhf_core.types import Experience

    from .section import PolicyObjectiveSection


def estimated(
    estimator: Callable[[Any], Tensor],
    episode: Experience,
    view: EpisodeView,
    *,
    rewards: Tensor,
    kl: Tensor | None = None,
    penalises_kl: bool = False,
) -> Tensor:
    """Compute advantages with an estimator, from the input that it `needs`. Collective.

    Args:
        estimator: The advantage estimator, with bound options.
        episode: This rank's R rows.
        view: The whole episode.
        rewards: [R, A] float, including penalties.
        kl: [R, A] nats. None without a reference.
        penalises_kl: Whether `rewards` includes a KL penalty.

    Returns:
        [R, A] float32.

    Raises:
        RlhfError: The estimator compares with a greedy answer, and the episode lacks greedy answers.
    """
    import torch

    mask, scores, greedy = episode.action_mask, view.scores, view.greedy_scores
    if greedy is None and needs_greedy_answer(estimator):
        raise RlhfError(
            f"{getattr(estimator, '__name__', 'it')} compares with a greedy answer to each prompt, which is missing",
            where="algorithm.advantage",
            hint="return True from the algorithm's needs_greedy_answer, so that the run's makers sample one",
        )
    rows = objective.AdvantageInput(
        rewards,
        mask,
        episode.group_ids,
        view.local(scores),
        sample_ids=episode.row_sample_ids,
        all_reduce=view.all_reduce,
        greedy_scores=None if greedy is None else view.local(greedy),
        values=episode.values,
        log_probs=episode.action_log_probs,
        trainer_log_probs=episode.trainer_log_probs,
        reference_log_probs=episode.reference_log_probs,
        named_rewards=episode.rewards,
        turn_ids=turn_ids(mask) if has_turns(episode) else None,
        columns=episode.columns,
    )
    if credits_turns(estimator) and has_turns(episode):
        rows = replace(rows, **turn_inputs(episode, view))
    if needs_of(estimator) != "scalars":
        return _check_shape(estimator(rows), mask.shape)
    totals = view.gather(rows.totals).float()
    named = dict(view.rewards)
    if penalises_kl:
        named[KL_PENALTY] = torch.where(view.lengths > 0, totals - scores, 0.0)
    scalars = replace(
        view,
        totals=totals,
        kl=None if kl is None else view.gather(rlhf_forward.masked_sum(kl.double(), mask, dim=-1)),
        rewards=named,
    )
    return rlhf_forward.to_tokens(view.local(_check_shape(estimator(scalars), scores.shape)), mask)


def check_groups(algorithm: str, estimator: Callable[..., Any] | None, samples_per_prompt: int) -> None:
    """Check that groups have several answers if the estimator compares the answers to one prompt.

    Args:
        algorithm: Name of the algorithm, for the error.
        estimator: The advantage estimator. None is not checked.
        samples_per_prompt: Size of a group.

    Raises:
        ConfigError: A group has only one answer.
    """
    if samples_per_prompt > 1 or not getattr(estimator, "compares_answers", False):
        return
    raise ConfigError(
        f"is {samples_per_prompt}, but {algorithm} compares the answers to one prompt with each other "
        f"({getattr(estimator, '__name__', 'its estimator')}), so nothing is learned from a group of one",
        where="train.samples_per_prompt",
        hint="set train.samples_per_prompt to 4 or more (at least 2)",
    )


def check_overlong(config: PolicyObjectiveSection, longest: int | None) -> None:
    """Raise `ConfigError` if the buffer of the overlong penalty is longer than the longest answer."""
    buffer = config.overlong_buffer_tokens
    if buffer is not None and (longest is None or buffer > longest):
        known = f"the longest answer ({longest} tokens)" if longest is not None else "an answer of unknown length"
        raise ConfigError(
            f"is {buffer}, more than {known}",
            where="algorithm.overlong_buffer_tokens",
            hint=f"at most engine.max_new_tokens{f' = {longest}' if longest else ''}. DAPO used a fifth of it",
        )


def _check_shape(advantages: Tensor, shape: torch.Size) -> Tensor:
    if advantages.shape != shape:
        axes = "[B, A]" if len(shape) == 2 else "[B]"
        raise TypeError(f"the advantage estimator returned {tuple(advantages.shape)}, not {tuple(shape)} ({axes})")
    return advantages
