"""`regex`: whether the completion matches a regular expression."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from rlhf_core.protocols import Reward

from .config import RegexConfig
from .matching import Matcher


def regex(rollouts: Sequence[Any], *, pattern: str, mode: Literal["search", "fullmatch"] = "search") -> list[float]:
    r"""1 if `pattern` matches somewhere in the completion (`search`) or all of it (`fullmatch`), else 0.

    Some patterns take exponential time on some texts. An answer that takes longer than a second counts as not matching,
    and the first such answer is logged.

    Args:
        rollouts: samples to score.
        pattern: Python regular expression. Flags are part of it, as in `(?is)yes`.
        mode: `search` or `fullmatch`.

    Raises:
        ValueError: if `pattern` is not a regular expression.

    Example:
        >>> from types import SimpleNamespace
        >>> regex([SimpleNamespace(completion="The answer is 42.")], pattern=r"answer is \d+")
        [1.0]
    """
    matcher = Matcher(pattern)
    return [float(matcher.matches(rollout, mode)) for rollout in rollouts]


def build(config: RegexConfig, context: object) -> Reward:
    """Return the reward with its options."""
    return partial(regex, pattern=config.pattern, mode=config.mode)
