"""A small disk of its own for a run folder, which can be filled to the last byte."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BYTES = 48 * 1024**2
_BLOCK = bytes(1 << 16)


class SmallDisk:
    """Mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        """Take what is free."""
        with self._ballast.open("wb", buffering=0) as file:
            for block in (_BLOCK, _BLOCK[:512], _BLOCK[:1]):
                try:
                    while file.write(block):
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(path: Path) -> Iterator[SmallDisk | None]:
    """None where this user may not mount one (`unshare --map-root-user --mount` lets everybody)."""
    mount = shutil.which("mount")
    path.mkdir()
    command = [str(mount), "-t", "tmpfs", "-o", f"size={_BYTES},mode=0700", "tmpfs", str(path)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        yield None
        return
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", *(["-l"] if os.geteuid() == 0 else []), str(path)], check=True)
