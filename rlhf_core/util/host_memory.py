"""Host memory: allocator settings of a training process, and its peak memory."""

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
_MAX_MMAP_THRESHOLD = 32 << 20
"""The value up to which glibc raises the mmap threshold by itself."""
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_CACHED_SHAPES = 64


def set_up_host_memory() -> None:
    """Configure allocation of host memory. Call it before the first tensor. The user's own settings are kept.

    - Memory freed by one pass is reused by the next. The first access to each page from the system costs as much as
      some kilobytes of arithmetic: a tenth of an iteration (`benchmarks/peers.md`). At most 1 GiB is kept that would
      otherwise be returned.
    - Huge pages for torch's tensors of 2 MiB and more, if torch is not imported yet.
    - oneDNN compiles a kernel for every new shape, and samples of varying lengths keep adding shapes. torch and oneDNN
      each cache 1,024 kernels, at 0.5 MB and a hole in the heap each. One pass through a model needs about twenty.

    Child processes inherit all settings except the first.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(cache, str(_CACHED_SHAPES))
    if sys.platform != "linux" or any(name in os.environ for name in _USER_SETTINGS):
        return
    with contextlib.suppress(AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def release_freed_memory() -> None:
    """Return free heap memory, which `set_up_host_memory` keeps, to the system.

    For the transition between two phases that use memory differently, so that one could not reuse much of the other's.
    The next phase touches new pages again, so do not call it for every pass. Does nothing without glibc.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process, in bytes.

    `ru_maxrss` is not enough: on Linux a process inherits its parent's value, for example a notebook's.
    """
    with contextlib.suppress(OSError):
        if match := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return int(match[1]) * 1024
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024
