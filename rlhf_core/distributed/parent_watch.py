"""For a process that serves another one: it ends when that one is gone, whatever it is doing."""

from __future__ import annotations

import os
import threading
import time

_CHECK_SECONDS = 1.0


def end_with_parent() -> None:
    """Watch the parent process from a thread of its own.

    What hangs does not see a connection close; without this it would outlive a killed run.
    """
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CHECK_SECONDS)
    os._exit(1)
