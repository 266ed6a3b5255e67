"""Checkpoints between episodes: atomic, verified before use, no pickle.

`checkpoints/step-N/` is written under a temporary name, fsynced, listed with sizes and SHA-256 in `files.json`, and
renamed. `checkpoints/last` names the newest valid one, and `best` the best by a metric, if one is chosen. The caller
decides on the content.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UserInputError, full_disk
from ..place import Place
from ..util.files import sync, write_bytes

_LISTING = "files.json"
_LAST = "last"
_BEST = "best"
logger = logging.getLogger(__name__)


class OnlyModelError(CheckpointError):
    """A checkpoint cannot be written, so the run ends. Its `model/` is the policy at that time."""


class CheckpointStore:
    """The checkpoints of one run folder.

    Args:
        folder: `checkpoints/` in the run folder.
        keep: number of newest checkpoints to keep.
    """

    has_failed = False
    """Whether a checkpoint could not be written after `writing` had returned. The next `writing` raises the error."""

    def __init__(self, folder: Path, *, keep: int = 1) -> None:
        self.folder = folder
        self.keep = keep

    def finishing(self, place: Place) -> AbstractContextManager[object]:
        """Return the context of a fit. Its end waits until every checkpoint is written. Collective."""
        return nullcontext()

    def settle(self, place: Place) -> None:
        """Wait until every checkpoint is written. Collective."""

    def path(self, step: int) -> Path:
        """Return the folder of checkpoint `step`, existing or not."""
        return self.folder / f"step-{step}"

    @contextmanager
    def writing(self, step: int, place: Place, *, best: int | None = None) -> Iterator[Path]:
        """Yield the folder to write checkpoint `step` into, which becomes the checkpoint after the block. Collective.

        On an error, nothing remains of it. Of the older checkpoints, the newest `keep` and the `best` remain, which
        `checkpoints/best` names.
        """
        partial = self.folder / f".partial-step-{step}"

        def begin() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

        try:
            with name_path_in_errors(self.path(step)):
                place.run_on_main(begin)
                yield partial
                place.run_on_main(lambda: self._commit(partial, step, best))
        except BaseException:
            if place.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if place.is_main:
            for old in self.steps()[: -self.keep]:
                if old != best:
                    shutil.rmtree(self._set_aside(old), ignore_errors=True)

    def _commit(self, partial: Path, step: int, best: int | None) -> None:
        """Sync the written files, then rename the folder. Previous checkpoints stay intact until then."""
        listing = {str(p.relative_to(partial)): _fingerprint(p) for p in _files(partial)}
        write_bytes(partial / _LISTING, json.dumps(listing, indent=1).encode())
        for path in [*partial.rglob("*"), partial]:
            sync(path)
        replaced = self._set_aside(step)  # left by a run that was resumed from an earlier checkpoint
        partial.rename(self.path(step))
        shutil.rmtree(replaced, ignore_errors=True)
        self._name(step, best)
        sync(self.folder)

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, complete or damaged, oldest first."""
        names = (p.name for p in self.folder.glob("step-*") if p.is_dir())
        return sorted(int(n.removeprefix("step-")) for n in names if n.removeprefix("step-").isdigit())

    def named(self) -> list[str]:
        """Return the names of checkpoints in the files `last` and `best`, whether or not these checkpoints exist."""
        files = (self.folder / _LAST, self.folder / _BEST)
        return sorted({path.read_text(errors="replace").strip()[:40] for path in files if path.is_file()} - {""})

    def whole(self, *, up_to: float = math.inf) -> Iterator[Path]:
        """Yield the complete checkpoints of at most `up_to` updates, newest first. Damaged ones only log a warning."""
        for path in (self.path(step) for step in reversed(self.steps()) if step <= up_to):
            if problem := find_damage(path):
                logger.warning("%s is skipped: %s", path, problem)
            else:
                yield path

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, None if there is none."""
        return next(self.whole(), None)

    def discard_after(self, step: int, *, best: int | None = None) -> None:
        """Prepare to continue from `step`: remove newer checkpoints, and partial ones of a killed run.

        `best`: the best of the remaining checkpoints.
        """
        with name_path_in_errors(self.folder / _LAST):
            self._name(step, best)
        for newer in [s for s in self.steps() if s > step]:
            self._set_aside(newer)
        self.discard_partial()

    def discard_partial(self) -> None:
        """Remove partial checkpoints of a killed run."""
        for partial in self.folder.glob(".partial-step-*"):
            shutil.rmtree(partial, ignore_errors=True)

    def _set_aside(self, step: int) -> Path:
        """Rename a checkpoint before its removal, so that it is never incomplete. The next start deletes leftovers."""
        aside = self.folder / f".partial-step-{step}-removed"
        with suppress(OSError):
            self.path(step).rename(aside)
        return aside

    def _name(self, last: int, best: int | None) -> None:
        write_bytes(self.folder / _LAST, f"step-{last}\n".encode())
        if best is None:
            (self.folder / _BEST).unlink(missing_ok=True)
        else:
            write_bytes(self.folder / _BEST, f"step-{best}\n".encode())


def find_complete_checkpoint(source: Path) -> Path | None:
    """Return the complete checkpoint that `source` refers to, None if there is none.

    Args:
        source: a checkpoint, or a run folder, which refers to its newest complete checkpoint.

    Returns:
        The folder of the checkpoint.

    Raises:
        UserInputError: `source` is a damaged checkpoint.
    """
    if not (source / _LISTING).exists():
        return CheckpointStore(source / "checkpoints").newest()
    if problem := find_damage(source):
        hint = "pass the run folder instead, to use its newest complete checkpoint"
        raise UserInputError(problem, where=str(source), hint=hint)
    return source


def find_damage(path: Path) -> str | None:
    """Return why the checkpoint `path` cannot be used, or None if every file is as written."""
    if not (path / _LISTING).is_file():
        return f"its {_LISTING} is missing"
    try:
        listing: Any = json.loads((path / _LISTING).read_text())
    except (OSError, ValueError, RecursionError) as error:
        return f"its {_LISTING} cannot be read ({error})"
    if not isinstance(listing, dict) or not listing:
        return f"its {_LISTING} does not list files"
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
    with path.open("rb") as stream:
        return [path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()]


@contextmanager
def name_path_in_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` of the block into a `CheckpointError` that names the path."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path.name}: {'the disk is full' if full_disk(error) else error}",
            where=str(path.parent),
            hint="the checkpoint before it is intact: free some space and start again with --resume auto",
        ) from error
