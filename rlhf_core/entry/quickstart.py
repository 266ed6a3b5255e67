"""The quickstart: two ordinary runs, a supervised warm start and the run proper, in one run folder."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from ..config.load import load_run
from ..config.resolve import ResolvedRun
from ..errors import ConfigError, InterruptedRun, PluginError
from ..plugins.discovery import Selected
from ..plugins.trust import FileTrust
from ..runfolder.folder import RunFolder, default_path
from ..training.request import RunInputs
from .resume import WARM_START, resumed_folder
from .run_record import owned, told_in_summary, undone_when_refused
from .train import TrainResult, prepare, train, train_in

logger = logging.getLogger("rlhf")


def environment_quickstart(environment: Selected) -> tuple[dict[str, Any], dict[str, Any]]:
    """The warm start and the run that an environment brings (`Component.quickstart`).

    Raises `ConfigError` where it brings none, `PluginError` where they are not where it says.
    """
    target = environment.component.quickstart
    if target is None:
        raise ConfigError(
            f"{environment.label} brings no quickstart",
            where="--environment",
            hint=f"write a run file with `model: {{path: …}}` and `environment: {environment.name}`, "
            "and say rlhf train RUN.yaml",
        )
    package, _, folder = target.partition(":")
    try:
        with as_file(files(package) / folder) as place:
            return load_run(place / "warm-start.yaml"), load_run(place / "run.yaml")
    except (ImportError, OSError, ConfigError) as error:
        raise PluginError(
            f"its quickstart {target} cannot be read: {error}", where=environment.label, hint="tell its authors"
        ) from error


def run_quickstart(
    warm_start: Mapping[str, Any],
    run: Mapping[str, Any],
    *,
    output: Path | None = None,
    resume: str | None = None,
    num_processes: int = 1,
    dry_run: bool = False,
    hooks: Sequence[object | str] = (),
    trust: FileTrust | bool = False,
    on_check: Callable[[RunInputs], None] | None = None,
) -> TrainResult | None:
    """Warm-start into `<output>/warm-start`, then train `run` from its model.

    A finished warm start is used again; an unfinished one is made anew. The other arguments are those of `train`
    and go to the second stage; the first is always one process.
    """
    if dry_run:
        train(warm_start, dry_run=True)
        place: dict[str, Any] = {"resume": resume, "output": output, "num_processes": num_processes}
        return train(run, dry_run=True, trust=trust, on_check=on_check, **place)
    resolved = prepare(run, num_processes=num_processes, trust=trust).resolved
    if resume is not None:
        output = resumed_folder(resume, output)
    with ExitStack() as stack:
        path = output or default_path(resolved.algorithm.name, datetime.now())
        folder = stack.enter_context(owned(path, resume))
        if resume is None:
            stack.enter_context(undone_when_refused(folder))
        if not _is_done(path / WARM_START):
            stack.enter_context(told_in_summary(folder))
            _warm_up(folder, warm_start, resolved, hooks)
        logger.info("stage 2 of 2: %s from the warm-started model", resolved.algorithm.name)
        second = {**run, "model": {**run["model"], "path": str(path / WARM_START / "model")}}
        prepared = prepare(second, hooks=hooks, num_processes=num_processes, trust=trust)
        return train_in(folder, prepared, resume)


def _warm_up(folder: RunFolder, warm_start: Mapping[str, Any], run: ResolvedRun, hooks: Sequence[object | str]) -> None:
    """Make the first stage; the folder says before what `run` it is for, so that a resume knows it."""
    stage = folder.path / WARM_START
    if RunFolder(stage).holds_run:
        shutil.rmtree(stage)
    stage.mkdir(exist_ok=True)
    if not folder.read_config():
        folder.write_config(run.to_mapping())
    logger.info("stage 1 of 2: supervised warm start")
    try:
        train(warm_start, output=stage, hooks=hooks)
    except InterruptedRun as error:
        again = f"continue with --output {folder.path} --resume auto: the warm start is short and is made anew"
        raise InterruptedRun("stopped in the warm start", hint=again) from error


def _is_done(folder: Path) -> bool:
    opened = RunFolder(folder)
    return opened.holds_run and opened.read_json(opened.summary).get("status") == "done"
