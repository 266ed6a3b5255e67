"""Restarts of a run that lost a trainer, without a person: all actors start again from the newest checkpoint.

It is a resume as by `--resume auto`, in the same driver and on the same Ray: the trainers load the checkpoint, cut
later lines from the run's files, and give the coordinator the samples that the checkpoint contains.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rlhf_core.runfolder import CheckpointStore, RunFolder
from rlhf_core.training import RunRequest

from .calls import COORDINATOR, ActorLostError, TrainerLostError

logger = logging.getLogger("rlhf.ray")

RESTART = "trainer-restart"
"""Kind of the event in the manifest."""
_KEY = "trainer_restarts"
"""Key of the summary: restarts of the whole run, including those before a resume."""


class TrainerRestarts:
    """Counts the restarts of a run, and finds the checkpoint for the next one."""

    def __init__(self, request: RunRequest, max_restarts: int) -> None:
        """Start to count.

        Args:
            request: The request of the run as it was started.
            max_restarts: Maximum number of restarts in this process.
        """
        self._request = request
        self._store = CheckpointStore(request.folder.checkpoints)
        self._before = _identities(request.folder)
        self._max_restarts = max_restarts
        self._used = 0
        self.total = len(request.folder.events(RESTART))
        """Restarts of the whole run."""
        if max_restarts or self.total:
            self._write_total()

    def allows(self, error: BaseException) -> bool:
        """Whether the run may be restarted after this error. Logs the reason if a lost trainer ends the run."""
        is_lost = isinstance(error, ActorLostError) and error.where == COORDINATOR
        if not (is_lost or isinstance(error, TrainerLostError)) or not self._max_restarts:
            return False
        if self._request.interrupted():
            logger.warning("no restart, since the run is stopping")
            return False
        if self._used >= self._max_restarts:
            logger.error("no restart: the %d of transport.trainer_restarts are used", self._max_restarts)
            return False
        return True

    def next_request(self, error: ActorLostError) -> RunRequest:
        """Count a restart, and return the request that continues the run.

        Call it once no trainer writes to the run folder any more.

        Raises:
            ActorLostError: `error`, with the reason why the run cannot continue: its checkpoints are lost.
        """
        folder = self._request.folder
        checkpoint = self._find_checkpoint()
        if checkpoint is None and (lost := self._lost_checkpoints()):
            raise type(error)(
                f"{error.message}. No restart: {lost}, which the run had written, cannot be read or are missing",
                where=error.where,
                hint=f"restore one in {folder.checkpoints} and continue with --resume auto, or start a new run",
            ) from error
        self._store.discard_partial()
        self._used += 1
        self.total += 1
        start = "the beginning, since the run has no checkpoint yet" if checkpoint is None else checkpoint.name
        logger.warning(
            "%s: %s. Restart %d of %d, from %s", error.where, error.message, self._used, self._max_restarts, start
        )
        name = None if checkpoint is None else checkpoint.name
        folder.add_event(RESTART, {"actor": error.where, "reason": error.message, "checkpoint": name})
        self._write_total()
        return replace(self._request, resume=checkpoint)

    def _find_checkpoint(self) -> Path | None:
        """The newest complete checkpoint that was written since the start, otherwise the one that it started from.

        The number does not show which one is newest: a resume from an earlier checkpoint discards later ones only when
        it has loaded its own. None starts from the beginning: it discards updates, but their weights are lost anyway.
        """
        for path in self._store.whole():
            if self._before.get(path) != _identity(path):
                return path
        if self._request.resume is not None and self._request.resume.is_dir():
            return self._request.resume
        return self._store.newest()

    def _lost_checkpoints(self) -> str:
        """Names of checkpoints that the run has written, complete or not."""
        names = {f"step-{step}" for step in self._store.steps()} | set(self._store.named())
        return ", ".join(sorted(names))

    def _write_total(self) -> None:
        folder = self._request.folder
        folder.write_summary({**folder.read_json(folder.summary), _KEY: self.total})


def _identities(folder: RunFolder) -> dict[Path, tuple[int, int]]:
    return {path: _identity(path) for path in _folders(folder.checkpoints)}


def _folders(checkpoints: Path) -> Iterator[Path]:
    return (path for path in checkpoints.glob("step-*") if path.is_dir())


def _identity(path: Path) -> tuple[int, int]:
    """Distinguishes a checkpoint from another one that replaces it."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns
