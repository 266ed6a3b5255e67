"""Makes untrusted text safe for a terminal: it must not move the cursor or change the title."""

from __future__ import annotations

import logging
import unicodedata

from .redact import redact_text

_HOSTILE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: control and format characters (which can reverse text), surrogates, separators."""
_KEPT = frozenset("\n\t\u200c\u200d")
"""Newlines, tabs, and the two joiners that scripts and emoji need."""


def printable(text: str) -> str:
    """`text` with what a terminal would obey written out as Python escapes: \\x1b in place of ESC."""
    if text.isprintable():
        return text
    return "".join(repr(char)[1:-1] if is_hostile(char) else char for char in text)


def is_hostile(char: str) -> bool:
    """Whether a terminal would act on a character instead of showing it."""
    return char not in _KEPT and unicodedata.category(char) in _HOSTILE


class PrintableFormatter(logging.Formatter):
    """A log formatter whose lines, tracebacks included, are printable and without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(redact_text(super().format(record)))
