"""Logs of a `PPOTrainer` fit in `log_dir`: metrics.jsonl, TensorBoard events, a W&B run."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from rlhf_core.components import LoggerContext
from rlhf_core.errors import UserInputError
from rlhf_core.hooks import HookRelay
from rlhf_core.loggers import open_logger
from rlhf_core.runfolder import MetricsWriter
from rlhf_core.training import EpisodeRecord
from rlhf_core.util import read_lines

_METRICS = "metrics.jsonl"


def open_record(
    log_dir: str | Path | None, *, use_wandb: bool, is_main: bool, step: int, hooks: HookRelay, stack: ExitStack
) -> EpisodeRecord:
    """Open the record of a fit that continues after update `step`; `stack` closes it and unregisters its loggers.

    Without `log_dir` (or away from rank 0) nothing is written. A `log_dir` that holds another fit's metrics gets a
    subfolder for this one. Raises `UserInputError` where a logger's package is missing, or W&B has no folder.
    """
    if log_dir is None and use_wandb:
        raise UserInputError("use_wandb needs a log_dir", where="PPOTrainer.fit", hint='log_dir="./logs"')
    if log_dir is None or not is_main:
        return EpisodeRecord(None, None, stack)
    folder = _folder(Path(log_dir), step)
    folder.mkdir(parents=True, exist_ok=True)
    context = LoggerContext(run_folder=folder, run={})
    names = [hooks.register(open_logger("tensorboard", context, {"folder": "."}), name="tensorboard")]
    if use_wandb:
        names.append(hooks.register(open_logger("wandb", context), name="wandb"))
    for name in names:
        stack.callback(hooks.unregister, name)

    def on_line(line: dict[str, object]) -> None:
        hooks.fire("metrics", line=line)

    path = folder / _METRICS
    if path.exists():
        metrics = MetricsWriter.resume(path, step=step, on_line=on_line)
    else:
        metrics = MetricsWriter(path, step=step, on_line=on_line)
    stack.enter_context(metrics)
    return EpisodeRecord(metrics, None, stack)


def _folder(log_dir: Path, step: int) -> Path:
    """`log_dir`, unless it holds metrics that this fit does not continue; then `fit-2`, `fit-3`, … in it."""
    candidates = (log_dir if number == 1 else log_dir / f"fit-{number}" for number in range(1, 1 << 20))
    return next(folder for folder in candidates if _continues(folder / _METRICS, step))


def _continues(path: Path, step: int) -> bool:
    if not path.exists():
        return True
    steps = [int(line["step"]) for line in read_lines(path)]
    return step > 0 and step in steps
