"""Chooses how a run reports its progress."""

from __future__ import annotations

import sys
from typing import TextIO

from .progress import PlainProgress, QuietProgress


def make_progress(*, quiet: bool = False, stream: TextIO | None = None) -> PlainProgress:
    """The hook plugin that fits the stream (default: standard output)."""
    target = stream or sys.stdout
    if quiet:
        return QuietProgress(target)
    if target.isatty():
        from .live_progress import LiveProgress

        return LiveProgress(target)
    return PlainProgress(target)
