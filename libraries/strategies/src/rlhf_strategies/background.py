"""Writes checkpoints in a thread while training continues.

`writing` copies weights and optimizer state to host memory, with all communication between processes, and returns. A
thread of rank 0 then writes, syncs and renames the files. At most one checkpoint is in progress.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from rlhf_core.errors import CheckpointError, GuardStop, InterruptedRun
from rlhf_core.place import LocalPlace, Place
from rlhf_core.runfolder.checkpoints import CheckpointStore, OnlyModelError, name_path_in_errors
from rlhf_core.util.bounded_thread import BoundedThread

from .base import GroupStrategy
from .checkpoint_files import CheckpointFiles, DeferredFiles

_TURN_SECONDS = 10.0
"""Maximum time that other ranks wait in one collective call. Rank 0 may wait for longer, in several turns."""
_PATIENCE_SECONDS = 1.0
"""Waits of at least this length are logged."""
logger = logging.getLogger("rlhf")


class BackgroundStore(CheckpointStore):
    """Checkpoints that a thread of rank 0 writes. Each is complete or absent, as those of the wrapped store.

    An error of the thread is logged at once, sets `has_failed`, and is raised on all ranks by the next `writing` or by
    the end of `finishing`.

    Args:
        inner: Writes the finished folders.
        timeout_seconds: Maximum wait for a checkpoint in progress.
    """

    def __init__(self, inner: CheckpointStore, *, timeout_seconds: float) -> None:
        """Create a store without a checkpoint in progress."""
        super().__init__(inner.folder, keep=inner.keep)
        self._inner = inner
        self._timeout_seconds = timeout_seconds
        self._thread: BoundedThread | None = None
        self._files = DeferredFiles()
        """Files of the checkpoint in progress."""
        self._current = ""
        """Name of the checkpoint in progress."""
        self._error: Exception | None = None

    @contextmanager
    def writing(self, step: int, place: Place, *, best: int | None = None) -> Iterator[Path]:
        """Yield the folder of checkpoint `step`, and let a thread complete it after the block. Collective.

        In the block, a `GroupStrategy` saves to copies in memory. Files that the block itself writes are written now.

        Raises:
            CheckpointError: The previous checkpoint could not be written, or not within the timeout.
        """
        self._join(place)
        staged, files = self.folder / f".partial-step-{step}-staged", DeferredFiles()

        def begin() -> None:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)

        try:
            with name_path_in_errors(self.path(step)):
                place.run_on_main(begin)
                with _deferring(place, files):
                    yield staged
        except BaseException:
            if place.is_main:
                shutil.rmtree(staged, ignore_errors=True)
            raise
        # An error after its start, such as a lost rank, must not remove files that the thread is about to complete.
        place.run_on_main(lambda: self._start(files, staged, step, best))

    @contextmanager
    def finishing(self, place: Place) -> Iterator[None]:
        """Return the context of a fit, whose end waits for the checkpoint in progress, also after an error.

        Raises:
            OnlyModelError: It could not be written. After an error of the fit this is only logged.
        """
        try:
            yield
        except InterruptedRun:  # raised on all ranks, as `GuardStop` is
            self._join_with_model(place)
            raise
        except GuardStop:
            with suppress(CheckpointError):
                self._join(place)
            raise
        except Exception:
            self._wait()
            raise
        except BaseException:  # such as the second Ctrl-C. The folder may soon belong to another session
            self._files.is_cancelled = True
            raise
        self._join_with_model(place)

    def settle(self, place: Place) -> None:
        self._join(place)

    def whole(self, *, up_to: float = math.inf) -> Iterator[Path]:
        """Wait for the checkpoint in progress, then return the complete ones."""
        self._wait()
        return super().whole(up_to=up_to)

    def _start(self, files: DeferredFiles, staged: Path, step: int, best: int | None) -> None:
        self._current, self._files = self.path(step).name, files
        thread = BoundedThread(self._write, "rlhf-checkpoint", (files, staged, step, best))
        thread.start()
        self._thread = thread

    def _write(self, files: DeferredFiles, staged: Path, step: int, best: int | None) -> None:
        """Write the files and complete the checkpoint. Runs in the thread."""
        try:
            with self._inner.writing(step, LocalPlace(torch.device("cpu"), torch.float32), best=best) as partial:
                files.run()
                partial.rmdir()
                staged.rename(partial)
        except Exception as error:
            shutil.rmtree(staged, ignore_errors=True)
            if not files.is_cancelled:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error, self.has_failed = error, True
        logger.error("checkpoint %s cannot be written: %s. The run ends after this episode", self._current, error)

    def _join(self, place: Place) -> None:
        """Wait for the checkpoint in progress, and raise its error on all ranks. Collective."""
        started = time.monotonic()
        while not place.broadcast_object(self._wait_until(started, _TURN_SECONDS)):
            pass
        place.run_on_main(self._raise)

    def _join_with_model(self, place: Place) -> None:
        """Do the same at the end of a fit that has written its model."""
        try:
            self._join(place)
        except CheckpointError as error:
            raise OnlyModelError(
                f"{error.message}. The model is written",
                where=error.where,
                hint="to continue from the previous checkpoint, if there is one, free space and start again with "
                "--resume auto",
            ) from error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        """Wait for the checkpoint in progress on this rank alone. Its error is only logged."""
        self._wait_until(time.monotonic(), self._timeout_seconds)

    def _wait_until(self, started: float, turn_seconds: float) -> bool:
        """Wait for at most a turn. Returns whether the wait, which started at `started`, is over."""
        thread, left = self._thread, started + self._timeout_seconds - time.monotonic()
        if thread is None:
            return True
        thread.join(min(_PATIENCE_SECONDS, turn_seconds, max(left, 0.0)))
        if thread.is_alive() and left > 0:
            logger.info("waiting for checkpoint %s, which is still being written (%.0f s left)", self._current, left)
            thread.join(min(turn_seconds, left))
        if thread.is_alive() and time.monotonic() < started + self._timeout_seconds:
            return False
        if thread.is_alive():
            self._files.is_cancelled = True
            self._fail(self._too_slow())
        self._thread = None
        return True

    def _too_slow(self) -> CheckpointError:
        return CheckpointError(
            f"{self._current} is not written after {self._timeout_seconds:g} s",
            where=str(self.folder),
            hint="is the disk slow? Save less often (checkpoint.every_episodes), or raise "
            "checkpoint.background.timeout_seconds",
        )


@contextmanager
def _deferring(place: Place, files: DeferredFiles) -> Iterator[None]:
    """Context in which the strategy saves to `files`. Strategies without that attribute write at once."""
    if not isinstance(place, GroupStrategy):
        yield
        return
    place.files = files
    try:
        yield
    finally:
        place.files = CheckpointFiles()
