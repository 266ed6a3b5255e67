"""Learning-rate schedules, in updates: linear warm-up from 0, then constant, linear or cosine to 0."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR, LRScheduler

_FILE = "scheduler.json"
Schedule = Literal["constant", "linear", "cosine"]


def lr_factor(update: int, *, schedule: Schedule, warmup_updates: int, total_updates: int) -> float:
    """Factor of the peak rate for update `update` (from 0). The first warm-up update already moves."""
    if update < warmup_updates:
        return (update + 1) / warmup_updates
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (update - warmup_updates) / max(1, total_updates - warmup_updates))
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


def make_scheduler(optimizer: Optimizer, *, schedule: Schedule, warmup_updates: int, total_updates: int) -> LambdaLR:
    """A scheduler that is stepped once an update."""
    from torch.optim.lr_scheduler import LambdaLR

    factor = partial(lr_factor, schedule=schedule, warmup_updates=warmup_updates, total_updates=total_updates)
    return LambdaLR(optimizer, factor)


def save_scheduler(scheduler: LRScheduler, path: Path) -> None:
    """Write how far a schedule has come into the folder `path`."""
    path.mkdir(parents=True, exist_ok=True)
    state = scheduler.state_dict()
    kept = {key: state[key] for key in ("last_epoch", "_step_count", "_last_lr") if key in state}
    (path / _FILE).write_text(json.dumps(kept))


def load_scheduler(scheduler: LRScheduler, path: Path) -> None:
    """Bring a schedule to where it was."""
    scheduler.load_state_dict({**scheduler.state_dict(), **json.loads((path / _FILE).read_text())})
