"""Which code a command runs: SECURITY.md says why.

A run file may name `FILE.py:NAME`, or a program to start, and may have come from a stranger. Whoever resolves a run
says with a `FileTrust` which of these may be run; what may not is an error, or, where none is run, is left alone.
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
    """True for `FILE.py:NAME`; also for a `.py` path whose name is missing or misspelled."""
    return ".py:" in name or name.endswith(".py")


def split_reference(reference: str, where: str) -> tuple[Path, str]:
    """`FILE.py:NAME` -> the absolute path and the name.

    Raises `PluginError`, as `where`: it names nothing, or there is no such file (a device or pipe is none).
    """
    match = _REFERENCE.match(reference)
    if match is None:
        raise PluginError(f'"{reference}" names no function', where=where, hint="write FILE.py:FUNCTION")
    path = _absolute(match["path"])
    try:
        is_there = path.is_file()
    except ValueError:  # a NUL in it
        is_there = False
    if not is_there:
        raise PluginError(f"no such file: {path}", where=where, hint="paths start at the current folder")
    return path, match["name"]


def referenced_files(value: Any) -> frozenset[Path]:
    """Every file that `FILE.py:NAME` names anywhere in a run file, or in a part of one; links are followed."""
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
    """Which files of code may be run, and which programs started."""

    runs: bool = True
    """False: none is run, and any option of what a file defines is accepted."""
    everything: bool = False
    folder: Path | None = None
    """The run file's: all in it and below it may be run, but for links that lead out of it."""
    files: frozenset[Path] = frozenset()
    """Those named on the command line, links followed."""

    def allows(self, path: Path) -> bool:
        """Whether a file, or all code in a folder, may be run."""
        if not self.runs or self.everything:
            return self.runs
        real = _real(path)
        return real in self.files or (self.folder is not None and real.is_relative_to(_real(self.folder)))

    def allows_model(self, path: str) -> bool:
        """Whether the code that comes with a model may be run; a hub model lies in no folder."""
        place = Path(path)
        return (self if place.is_dir() else replace(self, folder=None)).allows(place)

    def check(self, path: Path, where: str) -> None:
        """Raise `PluginError`, as `where`, for what may not be run, or, if nothing is run, for what is no file."""
        if not self.runs and not path.is_file():
            raise PluginError(f"no such file: {path}", where=where, hint="paths start at the current folder")
        if not self.runs or self.allows(path):
            return
        outside = "named on the command line"
        if self.folder is not None:
            outside = f"in or below {_real(self.folder)}, the run file's folder, nor {outside}"
        raise PluginError(
            f"{path} is not {outside}, so its code is not run",
            where=where,
            hint="read it; if you trust it, add --trust",
        )

    def check_command(self, command: Sequence[str]) -> None:
        """Raise `PluginError` for a program that may not be started.

        A file that may be run may be started; what is looked for in PATH is none, whatever its arguments name.
        """
        program = command[0]
        if not self.runs or self.everything or ("/" in program and self.allows(_absolute(program))):
            return
        below = "" if self.folder is None else f"{_real(self.folder)}, "
        raise PluginError(
            f"the program {printable(program)!r} is not a file in or below {below}the run file's folder, so it is not "
            "started",
            hint="read what it does; if you trust it, add --trust",
        )


EVERY_FILE = FileTrust(everything=True)
"""For a run that its caller wrote, or that was checked before."""
NO_FILE = FileTrust(runs=False)
"""For commands that only look at a run."""


def _absolute(path: str) -> Path:
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:  # ~nobody: a home that cannot be found
        return Path(path).absolute()


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # a circle of links, a NUL
        return path
