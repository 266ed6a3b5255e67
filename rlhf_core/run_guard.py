"""A run whose input turns out to be wrong before its first update leaves no trace; later it is a failed run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import RlhfError, UserInputError
from .runfolder import RunFolder


@contextmanager
def undone_when_refused(folder: Path) -> Iterator[None]:
    """Around a new run in `folder`.

    A `UserInputError` before the first update puts the folder back as it was, so that the same `--output` works once
    the input is mended; after it, a plain `RlhfError` takes its place.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    before = set(folder.iterdir()) if folder.is_dir() else set()
    had_updates = _has_updates(folder)
    try:
        yield
    except UserInputError as error:
        if _has_updates(folder) and not had_updates:
            raise RlhfError(error.message, where=error.where, hint=error.hint) from error
        for path in set(folder.iterdir()) - before if folder.is_dir() else ():
            _remove(path)
        for path in missing:
            with suppress(OSError):  # somebody else put something there meanwhile
                path.rmdir()
        raise


@contextmanager
def failed_when_refused() -> Iterator[None]:
    """Around the rest of a run that goes on from a checkpoint: wrong input is then a failure of what has started."""
    try:
        yield
    except UserInputError as error:
        raise RlhfError(error.message, where=error.where, hint=error.hint) from error


def _has_updates(folder: Path) -> bool:
    metrics = RunFolder(folder).metrics
    return metrics.exists() and metrics.stat().st_size > 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
