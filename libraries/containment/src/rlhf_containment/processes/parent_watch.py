"""Ends a helper process when its parent exits, even if the helper hangs."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

from rlhf_core.util.bounded_thread import BoundedThread

_CHECK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
"""`prctl`'s request for a signal at the parent's death (linux/prctl.h)."""


def end_with_parent() -> None:
    """Start a thread that exits this process when its parent exits.

    A hung process does not notice a closed connection and would otherwise outlive a killed run.
    """
    BoundedThread(_watch, "parent watch", (os.getppid(),)).start()


def killed_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` exits.

    The kernel does so when the thread that started this process ends, so that thread must live as long as the process.
    On systems other than Linux a thread watches instead. It does not run while another thread holds the GIL.

    Args:
        parent: process id of the parent.
    """
    if sys.platform != "linux":
        end_with_parent()
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CHECK_SECONDS)
    os._exit(1)
