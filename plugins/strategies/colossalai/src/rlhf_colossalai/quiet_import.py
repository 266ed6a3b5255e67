"""Silences ColossalAI's warnings at import (apex, tensornvme), and its deprecation warnings about torch calls."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Context for an import that drops the module's warnings and log lines, but not errors."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def ignore_deprecations() -> None:
    """Ignore deprecation warnings about calls that ColossalAI 0.5.0, written for torch 2.5, makes at every step."""
    for message in (
        r".*torch\.distributed\.\w+` is deprecated",
        r".*TypedStorage is deprecated",
    ):
        warnings.filterwarnings("ignore", message=message)
