"""Decides which code a command may execute. SECURITY.md explains why.

A run file may name `FILE.py:NAME`, or a program to start, and may come from a stranger. The caller that resolves a run
passes a `FileTrust` that decides which of these may be executed. A file that may not is an error, unless nothing is
executed at all, in which case it is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import PluginError
from ..util.redact import printable

_REFERENCE = re.compile(r"^(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)$", re.DOTALL)


def is_file_reference(name: str) -> bool:
    """Whether it is `FILE.py:NAME`, or a `.py` path whose name is missing or misspelled."""
    return ".py:" in name or name.endswith(".py")


def split_reference(reference: str, where: str) -> tuple[Path, str]:
    """Split `FILE.py:NAME` into the absolute path and the name.

    Raises:
        PluginError: it does not name a function, or the file is missing (a device or pipe is not a file).
    """
    match = _REFERENCE.match(reference)
    if match is None:
        raise PluginError(f'"{reference}" does not name a function', where=where, hint="write FILE.py:FUNCTION")
    path = _absolute(match["path"])
    try:
        is_file = path.is_file()
    except ValueError:  # the path contains NUL
        is_file = False
    if not is_file:
        raise PluginError(f"no such file: {path}", where=where, hint="paths start at the current folder")
    return path, match["name"]


def referenced_files(value: Any) -> frozenset[Path]:
    """Return every file that `FILE.py:NAME` refers to anywhere in a run file, or in a part of one, links followed."""
    if isinstance(value, str):
        match = _REFERENCE.match(value)
        return frozenset() if match is None else frozenset([_real(_absolute(match["path"]))])
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = (*value, *value.values())
    elif isinstance(value, list | tuple):
        parts = value
    return frozenset(path for part in parts for path in referenced_files(part))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTrust:
    """Which code files may be executed, and which programs started."""

    runs: bool = True
    """False: no file is executed, and its options are not checked."""
    everything: bool = False
    folder: Path | None = None
    """The run file's folder. All files in and below it may be executed, except links that lead out of it."""
    files: frozenset[Path] = frozenset()
    """Files named on the command line, links followed."""

    def allows(self, path: Path) -> bool:
        """Whether a file, or all code in a folder, may be executed."""
        if not self.runs or self.everything:
            return self.runs
        real = _real(path)
        return real in self.files or (self.folder is not None and real.is_relative_to(_real(self.folder)))

    def allows_model(self, path: str) -> bool:
        """Whether the code that comes with a model may be executed. A hub model is not in any folder."""
        place = Path(path)
        return (self if place.is_dir() else replace(self, folder=None)).allows(place)

    def check(self, path: Path, where: str) -> None:
        """Raise `PluginError` if the file may not be executed or, when none is executed, is missing."""
        if not self.runs and not path.is_file():
            raise PluginError(f"no such file: {path}", where=where, hint="paths start at the current folder")
        if not self.runs or self.allows(path):
            return
        outside = "named on the command line"
        if self.folder is not None:
            outside = f"in or below {_real(self.folder)}, the run file's folder, nor {outside}"
        raise PluginError(
            f"{path} is not {outside}, so its code is not executed",
            where=where,
            hint="read it, and add --trust if you trust it",
        )

    def check_command(self, command: Sequence[str]) -> None:
        """Raise `PluginError` for a program that may not be started.

        A file that may be executed may be started, but not a program found in PATH, whatever its arguments name.
        """
        program = command[0]
        if not self.runs or self.everything or ("/" in program and self.allows(_absolute(program))):
            return
        below = "" if self.folder is None else f"{_real(self.folder)}, "
        raise PluginError(
            f"the program {printable(program)!r} is not a file in or below {below}the run file's folder, so it is not "
            "started",
            hint="read it, and add --trust if you trust it",
        )


EVERY_FILE = FileTrust(everything=True)
"""For a run that its caller wrote, or that was checked before."""
NO_FILE = FileTrust(runs=False)
"""For commands that only inspect a run."""


def _absolute(path: str) -> Path:
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:  # ~user without a home folder
        return Path(path).absolute()


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # a circle of links, or NUL in the path
        return path
