"""The hook plugins that core itself brings to a run, as its `logging` section asks for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from .config_resolve import ResolvedRun
from .hooks import HookRelay

logger = logging.getLogger("rlhf")


class ReportWriter:
    """Writes `report.html` when a run ends, however it ends."""

    def rlhf_run_end(self, run_folder: Path) -> None:
        from .report import build_report

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
    from .loggers import PerformanceEvaluator, TensorBoardLogger, WandbLogger

    options = resolved.run.logging
    # Registered first, run last: pluggy calls the newest first, and the report reads what the others wrote.
    relay.register(ReportWriter(), name="report")
    relay.register(PerformanceEvaluator(announce=logger.info), name="performance")
    if options.tensorboard:
        relay.register(TensorBoardLogger(), name="tensorboard")
    if options.wandb:
        relay.register(WandbLogger(), name="wandb")
