"""Matches patterns against model output with a time limit, since some take exponential time on some texts.

The `regex` library is used, which accepts the patterns of Python's `re`, releases the GIL while it matches, and can be
stopped.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

SECONDS_PER_ANSWER = 1.0
"""Time limit of one match. Normal matches take microseconds."""
_log = logging.getLogger("rlhf.rewards")


class Matcher:
    """A compiled pattern that is matched against answers."""

    def __init__(self, pattern: str) -> None:
        """Compile the pattern. Raises `ValueError` if it is not a regular expression."""
        import regex

        try:
            self._compiled = regex.compile(pattern)
        except regex.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        except RecursionError:
            raise ValueError("not a regular expression that can be compiled: its groups nest too deeply") from None
        self._warned = False

    def matches(self, rollout: Any, mode: Literal["search", "fullmatch"]) -> bool:
        """Whether the pattern matches in the completion, or all of it. On a timeout, warns once and returns False."""
        match = self._compiled.search if mode == "search" else self._compiled.fullmatch
        try:
            return match(rollout.completion, timeout=SECONDS_PER_ANSWER, concurrent=True) is not None
        except TimeoutError:
            self._warn(rollout)
            return False

    def last(self, rollout: Any) -> str | None:
        """Return the last match in the completion: its first group, or all of it. None without a match."""
        try:
            matches = list(self._compiled.finditer(rollout.completion, timeout=SECONDS_PER_ANSWER, concurrent=True))
        except TimeoutError:
            self._warn(rollout)
            return None
        if not matches:
            return None
        text = matches[-1][1] if self._compiled.groups else matches[-1][0]
        return None if text is None else str(text)

    def _warn(self, rollout: Any) -> None:
        if not self._warned:
            _log.warning(
                "the pattern %r takes more than %g s on the answer of sample %d, which counts as no match: rewrite it "
                "so that it backtracks less (further timeouts are not logged)",
                self._compiled.pattern,
                SECONDS_PER_ANSWER,
                rollout.sample_id,
            )
        self._warned = True
