"""An event loop's selector that tells when the loop has nothing left to do."""

from __future__ import annotations

import selectors
from collections.abc import Callable


class WatchedSelector(selectors.DefaultSelector):
    """Tells True when its loop has nothing left to do but to wait, and False when that ends."""

    def __init__(self, tell: Callable[[bool], None]) -> None:
        super().__init__()
        self._tell = tell

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        self._tell(True)
        try:
            return super().select(timeout)
        finally:
            self._tell(False)
