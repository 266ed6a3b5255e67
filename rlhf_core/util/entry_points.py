"""Entry points of installed distributions in the groups `rlhf.…`. Reads metadata and imports nothing."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

PREFIX = "rlhf."


@dataclass(frozen=True, slots=True)
class InstalledEntry:
    """One entry point, and the distribution that brings it."""

    entry_point: EntryPoint
    distribution: str
    version: str


def installed_entries(group: str | None = None) -> tuple[InstalledEntry, ...]:
    """Those of one group (`rlhf.rewards`), or of all groups of ours.

    Metadata is read once, and again when something was put into a folder of `sys.path` or taken from it.
    """
    found = _read(tuple(sys.path), tuple(map(_modified, sys.path)))
    return found if group is None else tuple(each for each in found if each.entry_point.group == group)


def _modified(folder: str) -> int | None:
    try:
        return os.stat(folder or os.curdir).st_mtime_ns
    except OSError:
        return None


@lru_cache(maxsize=1)
def _read(path: tuple[str, ...], modified: tuple[int | None, ...]) -> tuple[InstalledEntry, ...]:
    """path, modified: what the answer depends on."""
    installed = entry_points()
    return tuple(
        InstalledEntry(
            entry,
            distribution=entry.dist.name if entry.dist else "unknown distribution",
            version=entry.dist.version if entry.dist else "?",
        )
        for group in sorted(installed.groups)
        if group.startswith(PREFIX)
        for entry in installed.select(group=group)
    )
