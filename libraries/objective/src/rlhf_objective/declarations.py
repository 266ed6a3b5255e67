"""Declarations of advantage estimators and policy losses about themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_core.algorithm import GroupPass, PassContext
    from rlhf_core.columns import Column

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


def rewards_from_zero(function: FunctionT) -> FunctionT:
    """Declare that an advantage estimator (`rlhf.advantages`) needs rewards of at least 0, without penalties in them.

    Args:
        function: The estimator.

    Returns:
        The estimator itself.
    """
    function.rewards_from_zero = True  # type: ignore[attr-defined]
    return function


def uses_pass(make: type[GroupPass]) -> Callable[[FunctionT], FunctionT]:
    """Declare a pass over finished samples, whose columns an advantage estimator (`rlhf.advantages`) reads.

    The values are in `AdvantageInput.columns`. The algorithm runs the pass only if the estimator is selected.

    Args:
        make: The pass, which is built from a `PassContext`.

    Returns:
        A decorator, which returns the estimator itself.

    Example:
        @uses_pass(ScoreNormPass)
        @needs("row")
        def my_estimator(rows: AdvantageInput) -> Tensor:
            return rows.rewards * rows.columns["score_norm"]
    """

    def declare(function: FunctionT) -> FunctionT:
        function.passes = (*_passes(function), make)  # type: ignore[attr-defined]
        return function

    return declare


def estimator_passes(estimator: Callable[..., Any] | None, context: PassContext) -> list[GroupPass]:
    """Build the passes that an estimator has declared by `uses_pass`.

    Args:
        estimator: An advantage estimator, possibly with bound options, or None, for which the result is empty.
        context: The argument of `RolloutAlgorithm.passes`.

    Returns:
        The passes, in order.
    """
    return [make(context) for make in _passes(estimator)]  # type: ignore[call-arg]


def estimator_columns(estimator: Callable[..., Any] | None) -> dict[str, Column]:
    """Return the columns of the passes that an estimator has declared by `uses_pass`.

    Args:
        estimator: An advantage estimator, possibly with bound options, or None, for which the result is empty.
    """
    return {name: column for make in _passes(estimator) for name, column in make.columns.items()}


def _passes(estimator: Callable[..., Any] | None) -> tuple[type[GroupPass], ...]:
    declared: tuple[type[GroupPass], ...] = getattr(estimator, "passes", ())
    return declared
