"""Atomic replacement of files and folders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` to write to; it is synced and renamed over `path`, or removed on error."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.unlink(missing_ok=True)  # a link left there would be followed
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yields a folder beside `path` to be made and filled, which then takes its place; on error it is removed."""
    beside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        yield beside
        shutil.rmtree(path, ignore_errors=True)
        beside.rename(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def discard_half_written(folder: Path) -> None:
    """Remove what processes that were killed in `replacing` have left beside the files of a folder."""
    for beside in folder.glob(".*.tmp"):
        if beside.name.split(".")[-2].isdigit():
            beside.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically by one with `content`."""
    with replacing(path) as beside:
        beside.write_bytes(content)
