"""Describes an error raised by third-party code, with its file and line."""

from __future__ import annotations

import os
import sys
import sysconfig
from contextlib import suppress
from itertools import dropwhile, groupby
from pathlib import Path
from traceback import extract_tb

_CORE = f"{Path(__file__).parents[1]}/"
_STANDARD = sysconfig.get_path("stdlib")


def error_text(error: BaseException, *, caller: str = "rlhf_core") -> str:
    """Return `KeyError: 'level' (rewards/mine.py, line 7)`.

    The line is the last one in the file that core called, regardless of deeper calls. It is missing if core did not
    call other code. caller: a module of a library whose frames count as core's.
    """
    place = _own_line(error, (_CORE, _folder_of(caller)))
    return f"{type(error).__name__}: {error}{f' ({place})' if place else ''}"


def _folder_of(module: str) -> str:
    return f"{Path(str(sys.modules[module.partition('.')[0]].__file__)).parent}/"


def _own_line(error: BaseException, callers: tuple[str, ...]) -> str:
    frames = groupby(extract_tb(error.__traceback__), lambda frame: frame.filename.startswith(callers))
    called = [list(part) for is_caller, part in frames if not is_caller]
    own = list(dropwhile(lambda frame: _is_standard(frame.filename), called[-1])) if called else []
    lines = [frame.lineno for frame in own if frame.filename == own[0].filename]
    return f"{_shown(own[0].filename)}, line {lines[-1]}" if own else ""


def _shown(file: str) -> str:
    """Return the path relative to the current folder, if it is below that."""
    with suppress(FileNotFoundError):  # the current folder was removed
        return file.removeprefix(f"{os.getcwd()}/")
    return file


def _is_standard(file: str) -> bool:
    return file.startswith(("<", _STANDARD)) and "site-packages" not in file
