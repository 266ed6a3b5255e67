"""The files of a command's working folder, as they are sent to the sandbox and back.

Both sides use this module. A folder contains regular files only: links, devices and empty folders are left out.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from typing import BinaryIO, NamedTuple

MAX_PATH = 1024
"""Maximum length of a path in a folder, in bytes."""
_CHUNK = 2**20


class FolderError(ValueError):
    """A folder that cannot be sent. The text follows the name of the folder: `has more than 10 files`."""


class FolderFile(NamedTuple):
    """A file of a working folder."""

    data: bytes
    executable: bool = False


def check_path(path: str) -> None:
    """Check that a path stays in its folder.

    Args:
        path: Path relative to the folder, with `/` between its parts.

    Raises:
        FolderError: it is absolute, leads out of the folder, is too long, or has empty parts.
    """
    parts = path.split("/")
    try:
        size = len(os.fsencode(path))
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can contain
        size = 0
    if not 0 < size <= MAX_PATH or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise FolderError(
            f"has a file with the path {path!r:.200}: it must be relative, without empty parts, . and .., "
            f"and at most {MAX_PATH} bytes of UTF-8"
        )


def send(files: Mapping[str, FolderFile], file: BinaryIO) -> None:
    """Write files by their paths to a binary file."""
    header = [[path, len(each.data), each.executable] for path, each in files.items()]
    file.write(json.dumps(header).encode() + b"\n")
    for each in files.values():
        file.write(each.data)


def receive(file: BinaryIO) -> dict[str, FolderFile]:
    """Return the files that `send` wrote. Raises `FolderError` for a bad path or if data is missing."""
    files = {}
    for path, size, executable in json.loads(file.readline() or b"[]"):
        check_path(path)
        data = file.read(size)
        if len(data) != size:
            raise FolderError(f"is incomplete: {path!r:.200} has {len(data)} of {size} bytes")
        files[path] = FolderFile(data, executable)
    return files


def save(files: Mapping[str, FolderFile], folder: str) -> None:
    """Create the files in an empty folder. Raises `OSError`, and `FolderError` for a path that is not safe."""
    for path, each in files.items():
        check_path(path)
        target = os.path.join(folder, path)
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(target, flags, 0o700 if each.executable else 0o600), "wb") as file:
            file.write(each.data)


def collect(folder: str, max_bytes: int) -> dict[str, FolderFile]:
    """Return the regular files of a folder that no process changes. Links are not followed.

    Args:
        folder: A folder that this process owns. Its unreadable parts are made readable.
        max_bytes: Maximum size of all files together. Sparse files count with their whole size.

    Returns:
        The files by path, sorted.

    Raises:
        FolderError: the folder is larger, or has a path that is too long.
        OSError: a part of it cannot be read.
    """
    files, left = {}, max_bytes
    for path, executable in _regular_files(folder):
        target = os.path.join(folder, path)
        os.chmod(target, 0o700 if executable else 0o600)
        with os.fdopen(os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            data = bytearray()
            while chunk := file.read(min(_CHUNK, left + 1)):
                data += chunk
                left -= len(chunk)
                if left < 0:
                    raise FolderError(f"has more than {max_bytes} bytes")
        files[path] = FolderFile(bytes(data), executable)
    return dict(sorted(files.items()))


def _regular_files(folder: str) -> Iterator[tuple[str, bool]]:
    """Yield path and executability of each regular file, without recursion."""
    waiting = [""]
    while waiting:
        parent = waiting.pop()
        os.chmod(os.path.join(folder, parent), 0o700)  # the program may have made it unreadable
        with os.scandir(os.path.join(folder, parent)) as entries:
            for entry in entries:
                path = os.path.join(parent, entry.name)
                mode = entry.stat(follow_symlinks=False).st_mode
                if len(os.fsencode(path)) > MAX_PATH:
                    raise FolderError(f"has a path of more than {MAX_PATH} bytes")
                if stat.S_ISDIR(mode):
                    waiting.append(path)
                elif stat.S_ISREG(mode):
                    yield path, bool(mode & stat.S_IXUSR)
