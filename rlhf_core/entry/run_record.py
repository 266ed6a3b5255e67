"""The run folder's account of a run: how it began, what is undone when its input is refused, who writes at its end."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..components import LoggerContext
from ..config.changes import Change, config_changes
from ..config.resolve import ResolvedRun
from ..errors import InterruptedRun, RlhfError, UserInputError
from ..hooks.relay import HookRelay
from ..hookspecs import Action
from ..models.kinds import owner_of
from ..plugins.discovery import discover
from ..plugins.trust import FileTrust, referenced_files
from ..prompts.records import left_out
from ..runfolder.checkpoint_state import RunState, read_run_state
from ..runfolder.checkpoints import CheckpointStore, OnlyModelError
from ..runfolder.file_watch import FileWatch
from ..runfolder.folder import RunFolder, RunStatus
from ..runfolder.manifest import collect_manifest, full_command
from ..training.decisions import ROLLBACK, finished_by, keys_of
from ..util.did_you_mean import fold
from ..util.held_signals import held_signals
from ..util.jsonl import write_json
from ..util.redact import redact_mapping
from .resume import find_checkpoint, has_updates
from .seal import seal

logger = logging.getLogger("rlhf")

RESUME = "resume"
RECREATE = "recreate"
"""Kinds of the manifest's events."""

_EXPECTED_TO_DIFFER = {"command", "events", "seed", "trusted_files"}
"""`seed` is an option, and reported as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run as it is about to begin in its folder."""

    resolved: ResolvedRun
    data_digest: str
    data_counts: Mapping[str, int]
    num_processes: int
    is_resumed: bool = False
    checkpoint: Path | None = None
    """Where a resume goes on; None where the run ended before it wrote one, and starts again."""
    changes: Sequence[Change] = ()
    """Options that a resume changes."""
    origin: Path | None = None
    """Folder of the run that this one makes again."""


def already_done(folder: RunFolder, plan: RunPlan) -> str | None:
    """Why a resume has nothing to do: a guard or hook ended the run as done, and is set as it was. None: it has."""
    if plan.checkpoint is None or folder.read_json(folder.summary).get("status") != "done":
        return None
    ended = finished_by(read_run_state(plan.checkpoint), plan.resolved)
    if ended is None or not folder.model.is_dir():
        return None
    return f"already done: {ended.by}: {ended.reason}; to go on, change {keys_of(ended.by, plan.resolved)}"


def begin_record(folder: RunFolder, plan: RunPlan) -> None:
    """Write `config.yaml` and `manifest.json`; note what a resume changes, or what differs from `plan.origin`."""
    earlier = folder.read_json(folder.manifest)
    config = plan.resolved.to_mapping()
    manifest = collect_manifest(
        seed=plan.resolved.run.train.seed,
        command=full_command(),
        data_digest=plan.data_digest,
        data_counts=plan.data_counts,
        num_processes=plan.num_processes,
    )
    kind = owner_of(plan.resolved.run.model.path)
    owners: dict[str, dict[str, str]] = {}
    for each in (*plan.resolved.selected, *([] if kind is None else [kind])):
        if fold(each.name) in discover(each.kind):  # not a file, or a function of this process
            owners.setdefault(each.kind, {})[each.name] = each.owner
    manifest["owners"] = owners
    code = seal(folder.path, _code_run(plan.resolved))
    folder.write_manifest({**manifest, **code, "events": earlier.get("events", []) if plan.is_resumed else []})
    folder.write_config(config)  # behind it: a config that is there can be gone on with, and its code is trusted
    if plan.is_resumed:
        folder.add_event(
            RESUME,
            {
                "checkpoint": None if plan.checkpoint is None else plan.checkpoint.name,
                "changes": [change.to_json() for change in plan.changes],
            },
        )
    for change in plan.resolved.adapted:
        logger.info("adapted to the run: %s", change)
    if told := left_out(plan.data_counts):
        logger.warning(told) if plan.data_counts.get("too_long") else logger.info(told)
    if plan.origin is not None:
        _tell_recreation(folder, RunFolder.read(plan.origin), config, manifest)


def _code_run(resolved: ResolvedRun) -> FileTrust:
    """Files of code and programs that the run names anywhere, and the model where its code is run."""
    model = resolved.run.model
    files = referenced_files(resolved.to_mapping())
    own = frozenset([Path(model.path).resolve()]) if model.trust_remote_code else frozenset()
    return FileTrust(files=files | own, commands=resolved.commands)


def tell_resume(plan: RunPlan) -> None:
    """Warn of a run that starts again, or has nothing left to do, and of each changed option, with what that means."""
    episodes = plan.resolved.run.train.episodes
    if plan.is_resumed and plan.checkpoint is None:
        logger.warning("the run ended before its first checkpoint: it starts again")
    elif plan.checkpoint is not None and read_run_state(plan.checkpoint).next_episode >= episodes:
        hint = "only model and report are made; to train on: --set train.episodes=N"
        logger.warning("all %d episodes are trained already: %s", episodes, hint)
    for change in plan.changes:
        what = change if plan.checkpoint is not None else f"{change.key}: {change.before!r} -> {change.after!r}"
        logger.warning("resumed with a changed config: %s", what)


def _tell_recreation(
    folder: RunFolder, origin: RunFolder, config: Mapping[str, Any], manifest: Mapping[str, Any]
) -> None:
    earlier = origin.read_json(origin.manifest)
    options = [
        f"{change.key}: {change.before!r} -> {change.after!r}"
        for change in config_changes(redact_mapping(origin.read_config()), redact_mapping(config))
    ]
    differences = [*options, *_differences(earlier, manifest)]
    for difference in differences:
        logger.warning("differs from %s: %s", origin.path, difference)
    folder.add_event(RECREATE, {"run": str(origin.path), "differences": differences})


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Differences that can change the numbers of the same config: versions, data, code, machine."""
    for key, value in after.items():
        if key in _EXPECTED_TO_DIFFER or key not in before or before[key] == value:
            continue
        if isinstance(value, Mapping) and isinstance(before[key], Mapping):
            names = [*value, *(name for name in before[key] if name not in value)]
            for name in (name for name in names if before[key].get(name) != value.get(name)):
                yield f"{key}.{name}: {before[key].get(name)!r} -> {value.get(name)!r}"
        else:
            yield f"{key}: {before[key]!r} -> {value!r}"


def refuse_output(path: Path) -> None:
    """Raise `UserInputError` for what cannot be the folder of a new run: it holds one, or cannot be made."""
    RunFolder(path).refuse_run()
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "is no folder that can be written to" if there.is_dir() else "is a file, not a folder"
        raise UserInputError(f"{there} {what}", where=str(path), hint="choose another --output")


@contextmanager
def owned(output: Path, resume: str | None) -> Iterator[RunFolder]:
    """The run folder, which belongs to this process within the block; refused, it is as it was.

    A KeyboardInterrupt has `run_is_done`: whether the run that the block is about had ended as done before it.

    Raises:
        UserInputError: the folder is another process's, or not what a new run or a resume needs.
    """
    if resume is not None and not RunFolder(output).has_begun:
        find_checkpoint(resume, output)  # says so where there is none
    with RunFolder.create(output) if resume is None else RunFolder.open(output) as folder:
        watch = FileWatch(folder)
        before = folder.read_json(folder.summary)
        try:
            yield folder
        except KeyboardInterrupt as error:
            summary = folder.read_json(folder.summary)
            error.run_is_done = summary != before and summary.get("status") == "done"  # type: ignore[attr-defined]
            raise
        except UserInputError:
            for path in folder.made if watch.has_folder else ():
                with suppress(OSError):  # something else stands there meanwhile
                    path.unlink(missing_ok=True) if path == folder.lock else path.rmdir()
            raise


@contextmanager
def undone_when_refused(folder: RunFolder, *, is_resumed: bool = False) -> Iterator[None]:
    """Around a run in `folder`, which is owned.

    A `UserInputError` before the first update of a new run puts the folder back as it was, so that the same `--output`
    works once the input is mended; after it, and in a resumed run, wrong input is a failure of what has started: a
    plain `RlhfError`.
    """
    watch = FileWatch(folder)
    before = set(folder.path.iterdir())
    had_updates = has_updates(folder)
    try:
        yield
    except UserInputError as error:
        if is_resumed or (has_updates(folder) and not had_updates):
            raise RlhfError(error.message, where=error.where, hint=error.hint) from error
        for path in set(folder.path.iterdir()) - before if watch.has_folder else ():
            _remove(path)
        raise


@contextmanager
def told_in_summary(folder: RunFolder, earlier: RunState | None = None) -> Iterator[None]:
    """Around a run: `summary.json` says that it goes on, and at its end never anything else than how it ended.

    Whoever trains writes the end; this one writes it where that could not (a killed process), or where something
    failed after it. A KeyboardInterrupt after a run is done leaves it done.

    earlier: what the checkpoint says that a run goes on from.
    """
    if earlier is None:
        folder.write_running()
    else:
        folder.write_running(eval_before=earlier.eval_before, wall_s=earlier.wall_s)
    watch = FileWatch(folder)
    started = time.perf_counter()
    try:
        yield
    except BaseException as error:
        if watch.has_folder:
            with held_signals(), told_where_it_fails(folder):
                _settle(folder, error, time.perf_counter() - started)
        raise


def _settle(folder: RunFolder, error: BaseException, seconds: float) -> None:
    said = folder.read_json(folder.summary)
    if isinstance(error, KeyboardInterrupt) and said.get("status") == "done":
        return
    is_running = said.get("status", "running") == "running"
    if said.get("status") != _status(folder, error):
        wall_s = said.get("wall_s", 0.0) + (seconds if is_running else 0.0)
        write_end(folder, error, said.get("eval_before"), said.get("eval_after"), wall_s)


def write_end(
    folder: RunFolder,
    error: BaseException | None,
    eval_before: float | None,
    eval_after: float | None,
    wall_s: float,
    finished: Action | None = None,
) -> dict[str, Any]:
    """Write the summary of a run that `error` ended, None: that is done; returns its content."""
    extra: dict[str, Any] = {"rollbacks": len(folder.events(ROLLBACK)), "model": _where_model(folder, error)}
    if finished is not None:
        extra["finished"] = {"guard": finished.by, "reason": finished.reason}
    return folder.write_summary(
        status=_status(folder, error), eval_before=eval_before, eval_after=eval_after, wall_s=wall_s, extra=extra
    )


def _status(folder: RunFolder, error: BaseException | None) -> RunStatus:
    if error is None:
        return "done"
    if isinstance(error, (InterruptedRun, KeyboardInterrupt)):
        return "interrupted"
    return "rolled-back-and-failed" if folder.events(ROLLBACK) else "failed"


def _where_model(folder: RunFolder, error: BaseException | None) -> str | None:
    """Where the trained policy is, for the summary: its folder, or the command that makes it; None: there is none."""
    if error is None or isinstance(error, (InterruptedRun, OnlyModelError)):
        return folder.model.name if folder.model.is_dir() else None
    has_checkpoint = bool(CheckpointStore(folder.checkpoints, keep=1).steps())
    return f"rlhf export {folder.path} --to DIR" if has_checkpoint else None


@contextmanager
def told_where_it_fails(folder: RunFolder) -> Iterator[None]:
    """Around what is written at the end of a run that failed: its own error is the one to raise."""
    try:
        yield
    except (OSError, RlhfError) as problem:
        logger.error("%s does not say how the run ended: %s", folder.summary, problem)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class FirstScore:
    """Keeps the score taken before training, for the summary of a run that goes on or does not come to its end."""

    def __init__(self, score: float | None, folder: RunFolder) -> None:
        """`score`: of the run that is continued."""
        self.score = score
        self._folder = folder

    def rlhf_eval_end(self, step: int, metrics: Mapping[str, float] | None) -> None:
        if step == 0 and metrics is not None:
            self.score = metrics.get("eval/score")
            summary = self._folder.read_json(self._folder.summary)
            write_json(self._folder.summary, {**summary, "eval_before": self.score})


def register_run_hooks(relay: HookRelay, resolved: ResolvedRun, run_folder: Path) -> None:
    """The loggers of the run."""
    from ..loggers.relay import register_loggers

    context = LoggerContext(run_folder=run_folder, run=redact_mapping(resolved.to_mapping()))
    register_loggers(relay, resolved.loggers, context)
