"""`regex`: the completion matches a regular expression."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from rlhf_core.protocols import Reward

from .config import RegexConfig
from .matching import Matcher


def regex(rollouts: Sequence[Any], *, pattern: str, mode: Literal["search", "fullmatch"] = "search") -> list[float]:
    """1 where `pattern` matches somewhere in the completion (`search`) or all of it (`fullmatch`), else 0.

    Flags are written into the pattern, as in `(?is)yes`. Some patterns take exponential time on some texts: an
    answer that takes a second counts as one that does not match, and the log says so.
    """
    matcher = Matcher(pattern)
    return [float(matcher.matches(rollout, mode)) for rollout in rollouts]


def build(config: RegexConfig, context: object) -> Reward:
    """The reward with its options, for the plugin's component."""
    return partial(regex, pattern=config.pattern, mode=config.mode)
