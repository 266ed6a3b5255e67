"""What an advantage estimator or a policy loss declares about itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

if TYPE_CHECKING:
    from torch import Tensor

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Needs = Literal["scalars", "row", "episode"]
"""Numbers of all rows alone, tensors of the rows that a rank trains on, or tensors of all rows on every rank."""


def needs(
    what: Needs, *, compares_answers: bool = False, greedy_answer: bool = False
) -> Callable[[FunctionT], FunctionT]:
    """Declare what an advantage estimator (`rlhf.advantages`) needs; one that declares nothing is given the episode.

    compares_answers: whether it holds the answers to one prompt against each other, so that one alone gets nothing.
    greedy_answer: whether it reads `greedy_scores`: each prompt then gets a greedy answer, too, which is scored.

    With `scalars` it takes `EpisodeView` and returns [B] values, one for each row's tokens; with any other an
    `AdvantageInput` of the rows it needs, and returns [B, A].
    """

    if what not in get_args(Needs):
        raise ValueError(f"an estimator needs one of {', '.join(get_args(Needs))}, not {what!r}")

    def declare(function: FunctionT) -> FunctionT:
        function.needs = what  # type: ignore[attr-defined]
        function.compares_answers = compares_answers  # type: ignore[attr-defined]
        function.greedy_answer = greedy_answer  # type: ignore[attr-defined]
        return function

    return declare


def needs_of(estimator: Callable[..., Any]) -> Needs:
    """The needs that an estimator has declared."""
    declared: Needs = getattr(estimator, "needs", "episode")
    return declared


def needs_greedy_answer(estimator: Callable[..., Any] | None) -> bool:
    """Whether an estimator has declared that it reads the score of a greedy answer."""
    return bool(getattr(estimator, "greedy_answer", False))


def marks(choose: Callable[..., Tensor]) -> Callable[[FunctionT], FunctionT]:
    """Declare that a policy loss (`rlhf.policy_losses`) treats some tokens otherwise, which are chosen once an episode.

    `choose(tokens: EpisodeTokens, *, …)` gives [R, A] bool; its options are those of the loss by the same name.
    The loss then finds it as `PolicyLossInput.marked`: statistics of an episode are for here, since a loss sees a
    micro-batch only.
    """

    def declare(function: FunctionT) -> FunctionT:
        function.choose = choose  # type: ignore[attr-defined]
        return function

    return declare
