"""Memory of a CPU: how a process that trains takes and keeps it, and the most it held."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` (malloc.h of glibc)."""
_KEPT_BYTES = 1 << 30
_LARGEST_FROM_HEAP = 32 << 20
"""What glibc lets the second threshold grow to by itself."""
_USER_SAYS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_CACHED_SHAPES = 64


def set_up_host_memory() -> None:
    """Called before the first tensor: how memory of a CPU is taken and kept. What the user has set stays.

    - What one pass freed serves the next. The first touch of each page that came back from the system costs as much as
      some kilobytes of arithmetic: a tenth of an iteration (`benchmarks/README.md`). At most 1 GiB is kept that would
      have been given back.
    - Huge pages for torch's tensors of 2 MiB and more; only where torch is not imported yet.
    - oneDNN compiles a kernel for every new shape, and samples of varied lengths bring new ones all the time. torch and
      oneDNN each keep 1,024, at 0.5 MB and a hole in the heap; one pass through a model needs some twenty.

    Processes started from this one have it all, too, but for the first.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(cache, str(_CACHED_SHAPES))
    if sys.platform != "linux" or any(name in os.environ for name in _USER_SAYS):
        return
    with contextlib.suppress(AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def peak_resident_bytes() -> int:
    """The most memory this process held.

    `ru_maxrss` alone would not do: on Linux a process starts with that of the one that started it, say a notebook's.
    """
    with contextlib.suppress(OSError):
        if found := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return int(found[1]) * 1024
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024
