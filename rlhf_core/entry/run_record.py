"""The run folder's account of a run: how it began, what is undone when its input is refused, who writes at its end."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..config.changes import config_changes
from ..config.resolve import ResolvedRun
from ..distributed.launch_env import read_launch_env
from ..errors import RlhfError, UserInputError
from ..hooks.relay import HookRelay
from ..runfolder.control_box import ControlBox
from ..runfolder.folder import RunFolder
from ..runfolder.manifest import collect_manifest, full_command
from ..training.request import RunRequest
from ..util.redact import redact_mapping

logger = logging.getLogger("rlhf")

RESUME = "resume"
RECREATE = "recreate"
"""Kinds of the manifest's events."""

_EXPECTED_TO_DIFFER = {"command", "events", "seed"}
"""`seed` is an option, and reported as one."""


def begin_record(request: RunRequest, origin: Path | None) -> None:
    """Write `config.yaml` and `manifest.json`; say what a resume changes, or what differs from the run `origin`."""
    folder = request.folder
    before, earlier = folder.read_config(), folder.read_json(folder.manifest)
    config = request.resolved.to_mapping()
    folder.write_config(config)
    manifest = collect_manifest(
        seed=request.resolved.run.train.seed,
        command=full_command(),
        data_digest=f"sha256:{request.inputs.prompts.digest}",
        num_processes=read_launch_env().world_size,
    )
    folder.write_manifest({**manifest, "events": earlier.get("events", []) if request.resume is not None else []})
    ControlBox(folder.control).clear()
    if request.resume is not None:
        _tell_resume(folder, request.resume, before, config)
    if origin is not None:
        _tell_recreation(folder, RunFolder.read(origin), config, manifest)


def _tell_resume(folder: RunFolder, checkpoint: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    changes = config_changes(redact_mapping(before), redact_mapping(after)) if before else []
    for change in changes:
        logger.warning("resumed with a changed config: %s", change)
    folder.add_event(RESUME, {"checkpoint": checkpoint.name, "changes": [change.to_json() for change in changes]})


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
    """What the same config may give other numbers by: versions, data, code, machine."""
    for key, value in after.items():
        if key in _EXPECTED_TO_DIFFER or key not in before or before[key] == value:
            continue
        if isinstance(value, Mapping) and isinstance(before[key], Mapping):
            names = [*value, *(name for name in before[key] if name not in value)]
            for name in (name for name in names if before[key].get(name) != value.get(name)):
                yield f"{key}.{name}: {before[key].get(name)!r} -> {value.get(name)!r}"
        else:
            yield f"{key}: {before[key]!r} -> {value!r}"


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


logger = logging.getLogger("rlhf")


class ReportWriter:
    """Writes `report.html` when a run ends, however it ends."""

    def rlhf_run_end(self, run_folder: Path) -> None:
        from ..report import build_report

        build_report([run_folder])


class FirstScore:
    """Keeps the score taken before training, for the summary of a run that does not come to its end."""

    def __init__(self, score: float | None) -> None:
        """`score`: of the run that is continued."""
        self.score = score

    def rlhf_eval_end(self, step: int, metrics: Mapping[str, float] | None) -> None:
        if step == 0 and metrics is not None:
            self.score = metrics.get("eval/score")


def register_run_hooks(relay: HookRelay, resolved: ResolvedRun) -> None:
    """TensorBoard and W&B where asked for, the performance evaluator and the report always."""
    from ..loggers import PerformanceEvaluator, TensorBoardLogger, WandbLogger

    options = resolved.run.logging
    # Registered first, run last: pluggy calls the newest first, and the report reads what the others wrote.
    relay.register(ReportWriter(), name="report")
    relay.register(PerformanceEvaluator(announce=logger.info), name="performance")
    if options.tensorboard:
        relay.register(TensorBoardLogger(), name="tensorboard")
    if options.wandb:
        relay.register(WandbLogger(), name="wandb")
