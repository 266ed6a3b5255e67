"""`RunLedger`: the states of a run, as its folder's `summary.json` records them.

    new -> running -> done, interrupted, failed, or rolled-back-and-failed
       \\-> refused: the folder is as it was before

A resumed run starts from any of the final states, or from `running` if its process was killed. The process that holds
the folder's lock owns the run: it takes the ledger, and moves the run out of `running` however the block ends. The
process that trains (the owner, or rank 0 of the processes that it launches) records the end first, with the scores.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from ..distributed.interrupts import held_signals
from ..errors import InterruptedRun, RlhfError, UserInputError
from ..runfolder.checkpoint_state import RunState
from ..runfolder.checkpoints import CheckpointStore, OnlyModelError
from ..runfolder.file_watch import FileWatch
from ..runfolder.folder import RunFolder, RunStatus
from ..training.decisions import ROLLBACK
from ..training.request import FitResult
from ..util.jsonl import write_json
from .resume import find_checkpoint, has_updates

logger = logging.getLogger("rlhf")


class RunLedger:
    """Owns a run folder, and moves its run from state to state."""

    def __init__(self, folder: RunFolder, *, is_resumed: bool) -> None:
        """Use `take`."""
        self.folder = folder
        self._is_resumed = is_resumed
        self._watch = FileWatch(folder)
        self._paths = set(folder.path.iterdir())
        self._summary = folder.read_json(folder.summary)
        self._had_updates = has_updates(folder)
        self._started: float | None = None

    @classmethod
    @contextmanager
    def take(cls, path: Path, resume: str | None) -> Iterator[RunLedger]:
        """Context in which the run folder `path` belongs to this process.

        A `UserInputError` before the first update of a new run puts the folder back as it was, so that the same
        `--output` works once the input is corrected. After that, and in a resumed run, wrong input is a failure of a
        started run: a plain `RlhfError`. A KeyboardInterrupt gets `run_is_done`: whether the run was done before it.

        Raises:
            UserInputError: another process owns the folder, or it is not what a new run or a resume needs.
        """
        if resume is not None and not RunFolder(path).has_begun:
            find_checkpoint(resume, path)  # raises the error that fits
        with RunFolder.create(path) if resume is None else RunFolder.open(path) as folder:
            ledger = cls(folder, is_resumed=resume is not None)
            try:
                yield ledger
            except BaseException as error:
                ledger._leave(error)
                raise

    def start(self, earlier: RunState | None = None) -> None:
        """Move to `running`. `earlier`: the state of the checkpoint from which a resume continues."""
        if earlier is None:
            self.folder.write_running()
        else:
            self.folder.write_running(eval_before=earlier.eval_before, wall_s=earlier.wall_s)
        self._started = time.perf_counter()

    def _leave(self, error: BaseException) -> None:
        if self._started is not None and self._watch.has_folder:
            with held_signals(), _errors_logged(self.folder):
                self._settle(error, time.perf_counter() - self._started)
        if isinstance(error, KeyboardInterrupt):
            summary = self.folder.read_json(self.folder.summary)
            error.run_is_done = summary != self._summary and summary.get("status") == "done"  # type: ignore[attr-defined]
        elif isinstance(error, UserInputError):
            has_started = self._is_resumed or (has_updates(self.folder) and not self._had_updates)
            if has_started and self._started is not None:
                raise RlhfError(error.message, where=error.where, hint=error.hint) from error
            self._refuse()

    def _settle(self, error: BaseException, seconds: float) -> None:
        """Record the end, if the process that trained could not: it was killed, or something failed after it."""
        recorded = self.folder.read_json(self.folder.summary)
        status = recorded.get("status", "running")
        if status == _status(self.folder, error) or (isinstance(error, KeyboardInterrupt) and status == "done"):
            return
        wall_s = recorded.get("wall_s", 0.0) + (seconds if status == "running" else 0.0)
        result = FitResult(recorded.get("eval_before"), recorded.get("eval_after"), step=0)
        _write_end(self.folder, error, result, wall_s)

    def _refuse(self) -> None:
        """Leave the folder as it was."""
        if not self._watch.has_folder:
            return
        for path in () if self._is_resumed else set(self.folder.path.iterdir()) - self._paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for path in self.folder.made:
            with suppress(OSError):  # it is not empty
                path.unlink(missing_ok=True) if path == self.folder.lock else path.rmdir()


class TrainingAccount:
    """What the process that trains records in the summary: the score before training, and the end. A hook plugin."""

    def __init__(self, folder: RunFolder) -> None:
        """`folder`: of a run that is `running`."""
        self._folder = folder
        self._watch = FileWatch(folder)
        self._started = time.perf_counter()
        summary = folder.read_json(folder.summary)
        self._wall_before: float = summary.get("wall_s", 0.0)
        self._result = FitResult(summary.get("eval_before"), None, step=0)

    def rlhf_eval_end(self, step: int, metrics: Mapping[str, float] | None) -> None:
        if step == 0 and metrics is not None:
            self._result = FitResult(metrics.get("eval/score"), None, step=0)
            summary = self._folder.read_json(self._folder.summary)
            write_json(self._folder.summary, {**summary, "eval_before": self._result.eval_before})

    def finish(self, result: FitResult) -> None:
        """Take the scores of a run that trained to its end. Raises `RlhfError` if its files have vanished."""
        self._watch.check()
        self._result = result

    def write_end(self, error: BaseException | None) -> dict[str, Any] | None:
        """Record how the run ended (None: it is done) and return the summary; None if its folder has vanished."""
        if self._watch.has_folder:
            with held_signals(), nullcontext() if error is None else _errors_logged(self._folder):
                wall_s = self._wall_before + time.perf_counter() - self._started
                return _write_end(self._folder, error, self._result, wall_s)
        return None


def _write_end(folder: RunFolder, error: BaseException | None, result: FitResult, wall_s: float) -> dict[str, Any]:
    extra: dict[str, Any] = {"rollbacks": len(folder.events(ROLLBACK)), "model": _place_of_model(folder, error)}
    if result.finished is not None:
        extra["finished"] = {"guard": result.finished.by, "reason": result.finished.reason}
    return folder.write_summary(
        status=_status(folder, error),
        eval_before=result.eval_before,
        eval_after=result.eval_after,
        wall_s=wall_s,
        extra=extra,
    )


def _status(folder: RunFolder, error: BaseException | None) -> RunStatus:
    if error is None:
        return "done"
    if isinstance(error, (InterruptedRun, KeyboardInterrupt)):
        return "interrupted"
    return "rolled-back-and-failed" if folder.events(ROLLBACK) else "failed"


def _place_of_model(folder: RunFolder, error: BaseException | None) -> str | None:
    """Folder of the trained policy, or the command that makes it; None if there is neither."""
    if error is None or isinstance(error, (InterruptedRun, OnlyModelError)):
        return folder.model.name if folder.model.is_dir() else None
    has_checkpoint = bool(CheckpointStore(folder.checkpoints, keep=1).steps())
    return f"rlhf export {folder.path} --to DIR" if has_checkpoint else None


@contextmanager
def _errors_logged(folder: RunFolder) -> Iterator[None]:
    """Around the end of a run that failed: its own error is the one to raise."""
    try:
        yield
    except (OSError, RlhfError) as problem:
        logger.error("%s does not say how the run ended: %s", folder.summary, problem)
