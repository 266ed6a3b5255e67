"""Declarations of advantage estimators and policy losses about themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

if TYPE_CHECKING:
    from torch import Tensor

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Needs = Literal["scalars", "row", "episode"]
"""scalars: only numbers of all rows. row: tensors of the rows that a rank trains on. episode: tensors of all rows on
every rank."""


def needs(
    what: Needs, *, compares_answers: bool = False, greedy_answer: bool = False, credits_turns: bool = False
) -> Callable[[FunctionT], FunctionT]:
    """Declare the input that an advantage estimator (`rlhf.advantages`) needs. The default is the whole episode.

    With `scalars` the estimator is called with an `EpisodeView` and returns [B] values, one for all tokens of a row.
    Otherwise it is called with an `AdvantageInput` of the rows that it needs, and returns [B, A].

    Args:
        what: `scalars`, `row` or `episode`.
        compares_answers: Whether it compares the answers to one prompt, so that a single answer has advantage 0.
        greedy_answer: Whether it reads `greedy_scores`. Each prompt then also gets a greedy answer, which is scored.
        credits_turns: Whether it credits turns of an environment. `AdvantageInput.rewards` then has each turn's reward
            at the turn's last token, and `turn_rewards`, `turn_numbers` and `turn_states` are set.

    Returns:
        A decorator, which returns the estimator itself.

    Raises:
        ValueError: `what` is unknown, or is not `episode` with `credits_turns`.

    Example:
        >>> @needs("scalars", compares_answers=True)
        ... def above_mean(episode: EpisodeView) -> Tensor:
        ...     return episode.totals - episode.totals.mean()
        >>> needs_of(above_mean)
        'scalars'
    """
    if what not in get_args(Needs):
        raise ValueError(f"an estimator needs one of {', '.join(get_args(Needs))}, not {what!r}")
    if credits_turns and what != "episode":
        raise ValueError("an estimator that credits turns needs episode: the turns of a sample may be in several rows")

    def declare(function: FunctionT) -> FunctionT:
        function.needs = what  # type: ignore[attr-defined]
        function.compares_answers = compares_answers  # type: ignore[attr-defined]
        function.greedy_answer = greedy_answer  # type: ignore[attr-defined]
        function.credits_turns = credits_turns  # type: ignore[attr-defined]
        return function

    return declare


def needs_of(estimator: Callable[..., Any]) -> Needs:
    """Return the needs that an estimator has declared by `needs`, or `episode`.

    Args:
        estimator: An advantage estimator, possibly with bound options.
    """
    declared: Needs = getattr(estimator, "needs", "episode")
    return declared


def needs_greedy_answer(estimator: Callable[..., Any] | None) -> bool:
    """Whether an estimator has declared by `needs` that it reads the score of a greedy answer.

    Args:
        estimator: An advantage estimator, or None, for which the result is False.
    """
    return bool(getattr(estimator, "greedy_answer", False))


def credits_turns(estimator: Callable[..., Any] | None) -> bool:
    """Whether an estimator has declared by `needs` that it credits the turns of an environment.

    Args:
        estimator: An advantage estimator, or None, for which the result is False.
    """
    return bool(getattr(estimator, "credits_turns", False))


def marks(choose: Callable[..., Tensor]) -> Callable[[FunctionT], FunctionT]:
    """Declare that a policy loss (`rlhf.policy_losses`) treats some tokens differently, selected once per episode.

    Use it for statistics of an episode, since a loss receives only a micro-batch.

    Args:
        choose: Called once per episode, on every rank, as `choose(tokens: EpisodeTokens, *, …)`, with options of the
            loss as its keyword arguments of the same name. Returns [R, A] bool, which the loss receives as
            `PolicyLossInput.marked`.

    Returns:
        A decorator, which returns the loss itself.

    Example:
        def likely(tokens: EpisodeTokens, *, threshold: float = -0.1) -> Tensor:
            return tokens.log_probs > threshold

        @marks(likely)
        def my_loss(batch: PolicyLossInput, *, threshold: float = -0.1) -> PolicyLoss: ...
    """

    def declare(function: FunctionT) -> FunctionT:
        function.choose = choose  # type: ignore[attr-defined]
        return function

    return declare
