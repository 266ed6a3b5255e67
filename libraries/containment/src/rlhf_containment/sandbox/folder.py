"""A private folder on disk for the mode `landlock`, and its removal regardless of its contents."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

_NOBODY = 65534


@contextmanager
def private_folder(source: str, stdin: str) -> Iterator[str]:
    """Context of a folder with `program.py`, `input` and an empty `work` for the program. Removed afterwards."""
    folder = tempfile.mkdtemp(prefix="rlhf-sandbox-")
    try:
        path = Path(folder)
        path.joinpath("program.py").write_text(source, encoding="utf-8", errors="replace")
        path.joinpath("input").write_text(stdin, encoding="utf-8", errors="replace")
        path.joinpath("work").mkdir(mode=0o700)
        if os.geteuid() == 0:  # the program runs as `nobody`, which may only pass through here and own `work`
            os.chown(path / "work", _NOBODY, _NOBODY)
            for each in ("program.py", "input"):
                path.joinpath(each).chmod(0o444)
            path.chmod(0o711)
        yield folder
    finally:
        remove_tree(folder)


def remove_tree(folder: str) -> None:
    """Remove a folder of any depth without following links or recursion.

    Nested folders are moved to the top, emptied there and removed, so that paths stay short.
    """
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    numbers = count()
    try:
        while names := os.listdir(top):
            for name in names:
                if not _is_folder(name, top):
                    os.unlink(name, dir_fd=top)
                    continue
                os.chmod(name, 0o700, dir_fd=top)  # the program may have made it unreadable
                _move_contents_to_top(name, top, numbers)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(folder)


def _move_contents_to_top(name: str, top: int, numbers: Iterator[int]) -> None:
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        for each in os.listdir(inner):
            if _is_folder(each, inner):
                os.chmod(each, 0o700, dir_fd=inner)  # a folder that cannot be written to cannot be moved
                os.rename(each, f".removed-{os.getpid()}-{next(numbers)}", src_dir_fd=inner, dst_dir_fd=top)
            else:
                os.unlink(each, dir_fd=inner)
    finally:
        os.close(inner)


def _is_folder(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
