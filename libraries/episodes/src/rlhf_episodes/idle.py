"""An event loop's selector that reports when the loop is idle."""

from __future__ import annotations

import selectors
from collections.abc import Callable


class WatchedSelector(selectors.DefaultSelector):
    """Calls `notify(True)` before its loop waits for events and `notify(False)` afterwards."""

    def __init__(self, notify: Callable[[bool], None]) -> None:
        super().__init__()
        self._notify = notify

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        self._notify(True)
        try:
            return super().select(timeout)
        finally:
            self._notify(False)
