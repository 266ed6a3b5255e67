"""Checkpoints between episodes: atomic, verified before use, no pickle.

`checkpoints/step-N/` is written beside its final name, fsynced, listed with sizes and SHA-256 in `files.json`, and
renamed. `checkpoints/last` names the newest valid one, `best` the best by a metric where one is chosen. The caller
decides on the content.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..place import Place
from ..util.files import write_bytes

_LISTING = "files.json"
_LAST = "last"
_BEST = "best"
logger = logging.getLogger(__name__)


class OnlyModelError(CheckpointError):
    """A run ends since a checkpoint cannot be written; its `model/` is the policy as it is then."""


class CheckpointStore:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def path(self, step: int) -> Path:
        """Folder of checkpoint `step`, existing or not."""
        return self._folder / f"step-{step}"

    def partial(self, step: int) -> Path:
        """Temporary folder in which checkpoint `step` is written."""
        return self._folder / f".partial-step-{step}"

    def begin(self, step: int) -> Path:
        """An empty folder to write checkpoint `step` into; `commit` makes it the checkpoint."""
        partial = self.partial(step)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        except OSError as error:
            raise write_error(partial, error) from error
        return partial

    def commit(self, step: int, *, best: int | None = None) -> Path:
        """Sync the written files, then rename the folder. Previous checkpoints stay intact until then.

        The newest `keep` of the older ones and the `best` stay; `checkpoints/best` names the latter.
        """
        partial = self.partial(step)
        final = self.path(step)
        try:
            listing = {str(p.relative_to(partial)): _fingerprint(p) for p in _files(partial)}
            write_bytes(partial / _LISTING, json.dumps(listing, indent=1).encode())
            for path in _files(partial):
                _fsync(path)
            for folder in [partial, *(p for p in partial.rglob("*") if p.is_dir())]:
                _fsync(folder)
            if final.exists():  # left by a run that was resumed from an earlier checkpoint
                final.rename(self._folder / f".partial-step-{step}-before")
            partial.rename(final)
            shutil.rmtree(self._folder / f".partial-step-{step}-before", ignore_errors=True)
            write_bytes(self._folder / _LAST, f"{final.name}\n".encode())
            self._name_best(best)
            _fsync(self._folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise write_error(final, error) from error
        for old in (step for step in self.steps()[: -self._keep] if step != best):
            self._remove(old)
        return final

    @contextmanager
    def writing(self, step: int, place: Place, *, best: int | None = None) -> Iterator[Path]:
        """Collective. Yields the folder to write checkpoint `step` into, which is the checkpoint after the block.

        On an error, nothing is left of it. `best`: see `commit`.
        """
        partial = self.partial(step)
        place.run_on_main(lambda: self.begin(step))
        try:
            yield partial
        except BaseException as error:
            if place.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise write_error(partial, error) from error
            raise
        place.run_on_main(lambda: self.commit(step, best=best))

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, complete or damaged, oldest first."""
        names = (p.name for p in self._folder.glob("step-*") if p.is_dir())
        return sorted(int(n.removeprefix("step-")) for n in names if n.removeprefix("step-").isdigit())

    def named(self) -> list[str]:
        """The names of checkpoints in the files `last` and `best`, whether these checkpoints still exist or not."""
        files = (self._folder / _LAST, self._folder / _BEST)
        return sorted({path.read_text(errors="replace").strip()[:40] for path in files if path.is_file()} - {""})

    def newest(self) -> Path | None:
        """The newest complete checkpoint; a damaged or changed one is skipped with a warning."""
        return next(self.whole(), None)

    def whole(self) -> Iterator[Path]:
        """Complete checkpoints, newest first; the others are skipped with a warning."""
        for step in reversed(self.steps()):
            path = self.path(step)
            problem = find_damage(path)
            if problem is None:
                yield path
            else:
                logger.warning("%s is skipped: %s", path, problem)

    def discard_after(self, step: int, *, best: int | None = None) -> None:
        """Prepare to continue from `step`: remove newer checkpoints, and partial ones of a killed run.

        `best`: the best checkpoint among those that stay.
        """
        try:
            write_bytes(self._folder / _LAST, f"step-{step}\n".encode())
            self._name_best(best)
        except OSError as error:
            raise write_error(self._folder / _LAST, error) from error
        for newer in [s for s in self.steps() if s > step]:
            self._remove(newer)
        self.discard_partial()

    def discard_partial(self) -> None:
        """Remove partial checkpoints of a killed run."""
        for partial in self._folder.glob(".partial-step-*"):
            shutil.rmtree(partial, ignore_errors=True)

    def _remove(self, step: int) -> None:
        """Take its name first: no checkpoint is left half removed. What a kill leaves of it, the next start removes."""
        removed = self._folder / f".partial-step-{step}-removed"
        with suppress(OSError):
            self.path(step).rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    def _name_best(self, best: int | None) -> None:
        if best is None:
            (self._folder / _BEST).unlink(missing_ok=True)
        else:
            write_bytes(self._folder / _BEST, f"step-{best}\n".encode())


def find_damage(path: Path) -> str | None:
    """Why the checkpoint `path` cannot be used; None when every file is as written."""
    if not (path / _LISTING).is_file():
        return f"its {_LISTING} is missing"
    try:
        listing: Any = json.loads((path / _LISTING).read_text())
    except (OSError, ValueError, RecursionError) as error:
        return f"its {_LISTING} cannot be read ({error})"
    if not isinstance(listing, dict) or not listing:
        return f"its {_LISTING} lists no files"
    present = {str(p.relative_to(path)) for p in _files(path)} - {_LISTING}
    if missing := sorted(listing.keys() - present):
        return f"files are missing: {', '.join(missing[:3])}"
    try:
        changed = [name for name, expected in listing.items() if _fingerprint(path / name) != expected]
    except OSError as error:
        return str(error)
    return f"files are damaged: {', '.join(sorted(changed)[:3])}" if changed else None


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def _fingerprint(path: Path) -> list[Any]:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return [path.stat().st_size, digest.hexdigest()]


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_error(path: Path, error: OSError) -> CheckpointError:
    """The error for a checkpoint that cannot be written to `path`."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return CheckpointError(
        f"cannot write {path.name}: {'the disk is full' if full else error}",
        where=str(path.parent),
        hint="the checkpoint before it is intact: free some space and start again with --resume auto",
    )
