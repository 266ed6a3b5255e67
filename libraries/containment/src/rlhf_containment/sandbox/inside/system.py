"""Paths that a sandboxed program may read: system programs, libraries and the Python interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
"""Devices to read and write. Mapped for writing, /dev/zero would be shared memory without a file."""
_OF_A_PREFIX = ("bin", "lib", "lib64", "pyvenv.cfg")
"""Readable parts of an interpreter's prefix. The prefix itself may be a home folder."""


def interpreter_paths(prefixes: Sequence[str]) -> list[str]:
    """Folders and files of the interpreter outside the system's own folders."""
    paths = {os.path.join(prefix, each) for prefix in prefixes for each in _OF_A_PREFIX}
    paths |= {os.path.realpath(each) for each in paths}
    return sorted(each for each in paths if os.path.exists(each) and not is_below(each, FOLDERS))


def is_below(path: str, folders: Sequence[str]) -> bool:
    """Whether `path` is one of the folders or inside one."""
    return any(path == each or path.startswith(each + "/") for each in folders)


def links_to(executable: str) -> Iterator[tuple[str, str]]:
    """Yield the symbolic links that lead from a path to its file, as (path, target)."""
    path = executable
    for _ in range(40):  # the kernel's limit on links
        if not os.path.islink(path):
            return
        target = os.readlink(path)
        yield path, target
        path = os.path.normpath(os.path.join(os.path.dirname(path), target))
