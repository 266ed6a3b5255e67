"""Runs the stages of the quickstart in one run folder: a warm start, models for the algorithm, the run itself."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_core.config.load import load_run
from rlhf_core.config.resolve import ResolvedRun
from rlhf_core.entry.ledger import RunLedger
from rlhf_core.entry.resume import find_checkpoint, find_resumed_run
from rlhf_core.entry.train import TrainResult, prepare, train, train_in
from rlhf_core.errors import InterruptedRun
from rlhf_core.plugins.trust import FileTrust
from rlhf_core.runfolder.folder import RunFolder, default_path
from rlhf_core.training.decisions import DECISION
from rlhf_core.wiring.inputs import RunInputs

from .stage_models import WARM_START, stage_models

logger = logging.getLogger("rlhf")


def run_quickstart(
    warm_start: Mapping[str, Any],
    run: Mapping[str, Any],
    *,
    stages: Mapping[str, Mapping[str, Any]] | None = None,
    output: Path | None = None,
    resume: str | None = None,
    restart: bool = False,
    num_processes: int = 1,
    dry_run: bool = False,
    hooks: Sequence[object | str] = (),
    trust: FileTrust | bool = False,
    on_check: Callable[[RunInputs], None] | None = None,
) -> TrainResult | None:
    """Warm-start into `<output>/warm-start`, then train `run` from its model.

    A finished stage is reused, and an unfinished one is run again. Only the last stage uses several processes.

    Args:
        warm_start: Run file of the first stage.
        run: Run file of the last stage.
        stages: Run files in between, by name (also the folder). Options of the algorithm name their models
            (`Component.stages`).
        output: Run folder. Default: named after the algorithm and the time.
        resume: As for `train`, like all other arguments, which apply to the last stage.
    """
    started = find_resumed_run(resume, output)
    resume = None if started is None else resume
    first = {WARM_START: warm_start, **(stages or {})}
    if dry_run:
        for stage in first.values():
            train(stage, dry_run=True)
        place: dict[str, Any] = {"resume": resume, "restart": restart, "output": output, "num_processes": num_processes}
        return train(run, dry_run=True, trust=trust, on_check=on_check, **place)
    resolved = prepare(run, num_processes=num_processes, trust=trust).resolved
    path = started or output or default_path(resolved.algorithm.name, datetime.now())
    with RunLedger.take(path, resume) as ledger:
        missing = [name for name in first if not _is_done(path / name)]
        if missing:
            if resume is not None:
                find_checkpoint(resume, path, restart=restart)  # raises before a stage runs
            ledger.start()
        for number, name in enumerate(first, start=1):
            if name in missing:
                logger.info("stage %d of %d: %s", number, len(first) + 1, name)
                _run_stage(ledger.folder, name, first[name], resolved, hooks)
        logger.info("the last stage: %s from the warm-started model", resolved.algorithm.name)
        options = stage_models(load_run(run))
        models = [(options[name], str(path / name / "model")) for name in first]
        prepared = prepare(load_run(run, models), hooks=hooks, num_processes=num_processes, trust=trust)
        return train_in(ledger, prepared, resume, restart)


def _run_stage(
    folder: RunFolder, name: str, run: Mapping[str, Any], last: ResolvedRun, hooks: Sequence[object | str]
) -> None:
    """Run an early stage. First write the config of the `last` run into the folder, so that a resume finds it."""
    stage = folder.path / name
    if RunFolder(stage).holds_run:
        shutil.rmtree(stage)
    stage.mkdir(exist_ok=True)
    if not folder.read_config():
        folder.write_config(last.to_mapping())
    resume_hint = f"continue with --output {folder.path} --resume auto"
    try:
        train(run, output=stage, hooks=hooks)
    except InterruptedRun as error:
        hint = f"{resume_hint}: the {name} is short and starts again"
        raise InterruptedRun(f"stopped in the {name.replace('-', ' ')}", hint=hint) from error
    if any(event["action"] == "interrupt" for event in RunFolder(stage).events(DECISION)):  # in its last episode
        raise InterruptedRun(f"stopped after the {name.replace('-', ' ')}", hint=resume_hint)


def _is_done(folder: Path) -> bool:
    run = RunFolder(folder)
    return run.holds_run and run.read_json(run.summary).get("status") == "done"
