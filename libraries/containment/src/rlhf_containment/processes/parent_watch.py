"""Ends a helper process when its parent is gone, whatever it is doing."""

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
    """Watch the parent process from a separate thread.

    A hung process does not notice that a connection closed; without this it would outlive a killed run.
    """
    BoundedThread(_watch, "parent watch", (os.getppid(),)).start()


def killed_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` is gone, whatever either is doing.

    Strictly, when the thread that started this process ends, so that thread must last. Where the system cannot
    (only Linux can), a thread watches instead, which does not run while another thread holds the GIL.
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
