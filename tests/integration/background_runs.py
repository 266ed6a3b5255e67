"""Runs of `test_background_checkpoints.py`, in processes of their own."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from running import PATIENCE_SECONDS, without_report
from strategy_runs import run_file

from rlhf_core import train
from rlhf_strategies import DeferredFiles

BACKGROUND: dict[bool, dict[str, Any]] = {False: {}, True: {"background": True}}


def run_of(strategy: str, *, background: bool) -> dict[str, Any]:
    run = run_file({"name": strategy})
    return {**run, "checkpoint": {**run["checkpoint"], **BACKGROUND[background]}}


def make_pairs(out: Path, names: list[str]) -> None:
    """Each strategy's run with checkpoints that are written at once, and in the background."""
    torch.set_num_threads(1)
    without_report()
    if names != ["single"]:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    for name in names:
        for background in BACKGROUND:
            train(run_of(name, background=background), output=out / f"{name}-{background}")


def train_held(out: Path, held: Path, hold_at: int) -> None:
    """A run whose thread keeps still, once, with the files of checkpoint number `hold_at` half written."""
    torch.set_num_threads(1)
    without_report()
    run, count = DeferredFiles.run, 0

    def hold(files: DeferredFiles) -> None:
        nonlocal count
        count += 1
        if count == hold_at:
            files._actions.popleft()()
            held.touch()
            time.sleep(PATIENCE_SECONDS)
        run(files)

    DeferredFiles.run = hold  # type: ignore[method-assign]
    train(run_of("single", background=True), output=out)
