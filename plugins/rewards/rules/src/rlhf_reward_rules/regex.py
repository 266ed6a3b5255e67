"""`regex`: the completion has a form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from rlhf_core.protocols import Reward

from .config import RegexConfig


def regex(rollouts: Sequence[Any], *, pattern: str, mode: Literal["search", "fullmatch"] = "search") -> list[float]:
    """1 where `pattern` matches somewhere in the completion (`search`) or all of it (`fullmatch`), else 0.

    Flags are written into the pattern, as in `(?is)yes`. Some patterns take exponential time on some texts and
    hold up the whole process: for one you do not trust, say `isolate: true`.
    """
    compiled = re.compile(pattern)
    match = compiled.search if mode == "search" else compiled.fullmatch
    return [float(match(rollout.completion) is not None) for rollout in rollouts]


def build(config: RegexConfig, context: object) -> Reward:
    """The reward with its options, for the plugin's component."""
    return partial(regex, pattern=config.pattern, mode=config.mode)
