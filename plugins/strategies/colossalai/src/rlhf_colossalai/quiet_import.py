"""ColossalAI without its remarks: about apex and tensornvme at import, and on calls torch has renamed since."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Context of an import: warnings and log lines of the imported are dropped, its errors are not."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def ignore_deprecations() -> None:
    """Drop the warnings on what ColossalAI 0.5.0, written for torch 2.5, calls at every step."""
    for message in (
        r".*torch\.distributed\.\w+` is deprecated",
        r".*TypedStorage is deprecated",
    ):
        warnings.filterwarnings("ignore", message=message)
