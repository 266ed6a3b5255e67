"""Matches patterns against model output with a time limit: some take exponential time on some texts.

The engine is the `regex` library, which reads patterns as Python's `re` does, lets other threads run while it matches,
and can be stopped.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

SECONDS_PER_ANSWER = 1.0
"""Processor time of one match. Those of sound patterns take microseconds."""
_log = logging.getLogger("rlhf.rewards")


class Matcher:
    """A pattern, for use on answers."""

    def __init__(self, pattern: str) -> None:
        """Raises `ValueError` where `pattern` is not a regular expression."""
        import regex

        try:
            self._compiled = regex.compile(pattern)
        except regex.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        except RecursionError:
            raise ValueError("not a regular expression that can be compiled: its groups nest too deeply") from None
        self._warned = False

    def matches(self, rollout: Any, mode: Literal["search", "fullmatch"]) -> bool:
        """Whether it matches somewhere in the completion, or all of it; on a time-out warns and returns False."""
        match = self._compiled.search if mode == "search" else self._compiled.fullmatch
        try:
            return match(rollout.completion, timeout=SECONDS_PER_ANSWER, concurrent=True) is not None
        except TimeoutError:
            self._warn(rollout)
            return False

    def last(self, rollout: Any) -> str | None:
        """Text of the last match in the completion: its first group, or all of it. None without a match."""
        try:
            matches = list(self._compiled.finditer(rollout.completion, timeout=SECONDS_PER_ANSWER, concurrent=True))
        except TimeoutError:
            self._warn(rollout)
            return None
        if not matches:
            return None
        held = matches[-1][1] if self._compiled.groups else matches[-1][0]
        return None if held is None else str(held)

    def _warn(self, rollout: Any) -> None:
        if not self._warned:
            _log.warning(
                "the pattern %r takes more than %g s on the answer of sample %d, which counts as no match: rewrite it "
                "so that it backtracks less; later ones are not mentioned",
                self._compiled.pattern,
                SECONDS_PER_ANSWER,
                rollout.sample_id,
            )
        self._warned = True
