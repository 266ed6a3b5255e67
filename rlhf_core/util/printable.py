"""Text for a terminal: what a model or somebody else's code wrote must not move its cursor or change its title."""

from __future__ import annotations

import logging
import unicodedata

from .redact import redact_text

_HOSTILE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: control and format characters (which turn the direction of text), surrogates, separators."""
_KEPT = frozenset("\n\t\u200c\u200d")
"""Lines and tabs, and the two joiners that scripts and emoji need."""


def printable(text: str) -> str:
    """`text` with what a terminal would obey written out as Python escapes: \\x1b in place of ESC."""
    if text.isprintable():
        return text
    return "".join(repr(char)[1:-1] if is_hostile(char) else char for char in text)


def is_hostile(char: str) -> bool:
    """Whether a terminal would act on a character in place of showing it."""
    return char not in _KEPT and unicodedata.category(char) in _HOSTILE


class PrintableFormatter(logging.Formatter):
    """A formatter whose lines, tracebacks included, are printable and hold no secret."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(redact_text(super().format(record)))
