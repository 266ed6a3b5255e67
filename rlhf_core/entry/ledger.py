"""`RunLedger`: the states of a run, as recorded in `summary.json` of its folder.

    new -> running -> done, interrupted, failed, or rolled-back-and-failed
       \\-> rejected: the folder is as it was before

A resumed run starts from any of the final states, or from `running` if its process was killed. The process that holds
the folder's lock owns the run: it takes the ledger, and moves the run out of `running` when its block exits for any
reason. The process that trains (the owner, or rank 0 of the processes that it launches) records the end first, with the
scores.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..distributed.interrupts import delay_signals
from ..errors import InterruptedRun, RlhfError, UserInputError
from ..runfolder.checkpoint_state import RunState
from ..runfolder.checkpoints import CheckpointStore, OnlyModelError
from ..runfolder.folder import FileWatch, RunFolder, RunStatus
from ..training.decisions import ROLLBACK
from ..training.request import FitResult
from .resume import find_checkpoint, has_updates

logger = logging.getLogger("rlhf")


class RunLedger:
    """Moves the run of a folder from state to state. A hook plugin of the process that trains."""

    def __init__(self, folder: RunFolder, *, is_running: bool = True) -> None:
        """Open the ledger of a run that another process has started. Its owner uses `take`."""
        self.folder = folder
        self._is_running = is_running
        self._watch = FileWatch(folder)
        self._started = time.perf_counter()

    @classmethod
    @contextmanager
    def take(cls, path: Path, resume: str | None) -> Iterator[RunLedger]:
        """Context in which the run folder `path` belongs to this process.

        A `UserInputError` before the first update of a new run restores the folder, so that the same `--output` works
        once the input is corrected. After that, and in a resumed run, wrong input fails a started run and becomes a
        plain `RlhfError`. A KeyboardInterrupt gets the attribute `run_is_done`: whether the run was done before it.

        Raises:
            UserInputError: another process owns the folder, or it does not suit a new run or a resume.
        """
        if resume is not None and not RunFolder(path).has_begun:
            find_checkpoint(resume, path)  # raises the more specific error if there is no checkpoint either
            raise UserInputError(
                "this folder does not contain a run", where=str(path), hint="pass the folder given as --output"
            )
        with RunFolder.take(path, is_new=resume is None) as folder:
            ledger = cls(folder, is_running=False)
            try:
                yield ledger
            except BaseException as error:
                if ledger._is_running:
                    ledger.end(error)
                if isinstance(error, KeyboardInterrupt):
                    is_done = ledger._is_running and folder.read_json(folder.summary).get("status") == "done"
                    error.run_is_done = is_done  # type: ignore[attr-defined]
                if isinstance(error, UserInputError):
                    if ledger._is_running and (resume is not None or has_updates(folder)):
                        raise RlhfError(error.message, where=error.where, hint=error.hint) from error
                    if resume is None and ledger._watch.has_folder:
                        folder.remove_made()
                raise

    def start(self, earlier: RunState | None = None) -> None:
        """Move to `running`. `earlier`: state of the checkpoint from which a resume continues."""
        self._is_running = True
        self._started = time.perf_counter()
        self.folder.write_summary(
            {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "status": "running",
                "eval_before": None if earlier is None else earlier.eval_before,
                "eval_after": None,
                "wall_s": 0.0 if earlier is None else earlier.wall_s,
            }
        )

    def rlhf_eval_end(self, step: int, metrics: Mapping[str, float] | None) -> None:
        if step == 0 and metrics is not None:
            summary = self.folder.read_json(self.folder.summary)
            self.folder.write_summary({**summary, "eval_before": metrics.get("eval/score")})

    def end(self, error: BaseException | None, result: FitResult | None = None) -> dict[str, Any] | None:
        """Record how the run ended, unless that is recorded already, and return the summary.

        error: None if the run is done. result: result of a run that trained to its end. Returns None if the folder
        has vanished or cannot be written to, so that the run's own error is raised.
        """
        if not self._watch.has_folder:
            return None
        try:
            with delay_signals():
                return self._write_end(error, result)
        except (OSError, RlhfError) as problem:
            if error is None:
                raise
            logger.error("%s does not record how the run ended: %s", self.folder.summary, problem)
            return None

    def _write_end(self, error: BaseException | None, result: FitResult | None) -> dict[str, Any]:
        """Add the final status with scores, model and wall time, unless the same status is recorded already."""
        folder = self.folder
        recorded = folder.read_json(folder.summary)
        old_status, status = recorded.get("status", "running"), _status(folder, error)
        if old_status == status or (isinstance(error, KeyboardInterrupt) and old_status == "done"):
            return recorded
        summary = recorded | {"rollbacks": len(folder.events(ROLLBACK)), "model": _model_location(folder, error)}
        if result is None:
            result = FitResult(recorded.get("eval_before"), recorded.get("eval_after"), step=0)
        if result.finished is not None:
            summary["finished"] = {"guard": result.finished.by, "reason": result.finished.reason}
        seconds = time.perf_counter() - self._started if old_status == "running" else 0.0
        summary |= {"status": status, "eval_before": result.eval_before, "eval_after": result.eval_after}
        summary["wall_s"] = recorded.get("wall_s", 0.0) + seconds
        folder.write_summary(summary)
        return summary


def _status(folder: RunFolder, error: BaseException | None) -> RunStatus:
    if error is None:
        return "done"
    if isinstance(error, (InterruptedRun, KeyboardInterrupt)):
        return "interrupted"
    return "rolled-back-and-failed" if folder.events(ROLLBACK) else "failed"


def _model_location(folder: RunFolder, error: BaseException | None) -> str | None:
    """Return the folder of the trained policy, or the command that exports it, or None if there is neither."""
    if error is None or isinstance(error, (InterruptedRun, OnlyModelError)):
        return folder.model.name if folder.model.is_dir() else None
    has_checkpoint = bool(CheckpointStore(folder.checkpoints).steps())
    return f"rlhf export {folder.path} --to DIR" if has_checkpoint else None
