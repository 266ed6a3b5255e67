"""How a process that trains takes and keeps memory of a CPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` (malloc.h of glibc)."""
_KEPT_BYTES = 1 << 30
_LARGEST_FROM_HEAP = 32 << 20
"""What glibc lets the second threshold grow to by itself."""
_USER_SAYS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def reuse_host_memory() -> None:
    """Keep what one pass freed for the next, and ask for huge pages; what the user has set stays.

    The activations of every pass are freed and taken anew, and the first touch of each page that came back from the
    system costs as much as some kilobytes of arithmetic: a tenth of an iteration (`benchmarks/README.md`). At most
    1 GiB is kept that would have been given back. Huge pages are for torch's tensors of 2 MiB and more, and only where
    torch is not imported yet; processes started from this one have them, too.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if sys.platform != "linux" or any(name in os.environ for name in _USER_SAYS):
        return
    with contextlib.suppress(AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
