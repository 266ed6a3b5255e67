"""The quickstart: two ordinary runs, a supervised warm start and the run proper, in one run folder."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ..config.resolve import resolve
from ..errors import InterruptedRun, UserInputError
from ..runfolder.folder import RunFolder, default_path, find_newest
from .train import TrainResult, find_checkpoint, train

WARM_START = "warm-start"
logger = logging.getLogger("rlhf")


def run_quickstart(
    warm_start: Mapping[str, Any],
    run: Mapping[str, Any],
    *,
    output: Path | None = None,
    resume: str | None = None,
    num_processes: int = 1,
    dry_run: bool = False,
    hooks: Sequence[object | str] = (),
) -> TrainResult | None:
    """Warm-start into `<output>/warm-start`, then train `run` from its model.

    A finished warm start is used again; an unfinished one is made anew. The other arguments are those of `train`
    and go to the second stage; the first is always one process.
    """
    if dry_run:
        train(warm_start, dry_run=True)
        return train(run, dry_run=True, num_processes=num_processes)
    if output is None and resume == "auto":
        output = find_newest()
    output = output or default_path(resolve(run).algorithm.name, datetime.now())
    if resume is None and RunFolder(output).holds_run:
        raise UserInputError(
            "this folder already holds a run",
            where=str(output),
            hint="go on with it: --resume auto; or start anew with another --output",
        )
    if resume is not None:
        find_checkpoint(resume, output)
    train(run, dry_run=True, num_processes=num_processes)
    folder = output / WARM_START
    if not _is_done(folder):
        if RunFolder(folder).holds_run:
            shutil.rmtree(folder)
        logger.info("stage 1 of 2: supervised warm start")
        try:
            train(warm_start, output=folder, hooks=hooks)
        except InterruptedRun as error:
            again = f"start again with --output {output}: the warm start is short and is made anew"
            raise InterruptedRun("stopped in the warm start", hint=again) from error
    logger.info("stage 2 of 2: %s from the warm-started model", resolve(run).algorithm.name)
    second = {**run, "model": {**run["model"], "path": str(folder / "model")}}
    return train(second, output=output, resume=resume, num_processes=num_processes, hooks=hooks)


def _is_done(folder: Path) -> bool:
    opened = RunFolder(folder)
    return opened.holds_run and opened.read_json(opened.summary).get("status") == "done"
