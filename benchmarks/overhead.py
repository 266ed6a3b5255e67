"""Cost of hooks, metrics, samples, guards, control and checkpoints in a quickstart run.

The time inside each of them is summed during the quickstart's PPO stage. This is more precise than the difference of
two runs. The warm start is excluded, since it does not change the cost of an episode. Exits with 1 above the bound of
3%.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_core import train
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.training.checkpoint_saver import CheckpointSaver
from rlhf_core.training.decisions import Decisions
from rlhf_core.training.record import EpisodeRecord
from rlhf_start.quickstart import stage as quickstart_stage

BOUND = 0.03
PARTS: dict[str, tuple[type, tuple[str, ...]]] = {
    "hooks and loggers": (HookRelay, ("fire", "_close")),
    "metrics and samples": (
        EpisodeRecord, ("rollouts", "start_episode", "update", "end_episode", "evaluation", "flush"),
    ),
    "guards and live control": (Decisions, ("take",)),
    "checkpoints": (CheckpointSaver, ("save", "improves")),
}  # fmt: skip


class Clock:
    """Seconds in the outermost of the measured calls of each thread, by part."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.running = False
        self._inside = threading.local()

    def watch(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if not self.running or getattr(self._inside, "yes", False):
                return function(*args, **options)
            self._inside.yes = True
            started = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds[part] += time.perf_counter() - started
                self._inside.yes = False

        return timed

    # Measure only while episodes run, since the rest is not part of the loop.

    def rlhf_fit_start(self) -> None:
        self.running, self.started = True, time.perf_counter()

    def rlhf_fit_end(self) -> None:
        self.running, self.wall = False, time.perf_counter() - self.started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, help="episodes of the quickstart's PPO stage, default: all")
    options = parser.parse_args()
    clock = Clock()
    for part, (owner, names) in PARTS.items():
        for name in names:
            setattr(owner, name, clock.watch(part, getattr(owner, name)))
    with tempfile.TemporaryDirectory() as folder:
        run = quickstart_stage("ppo")
        overrides = [] if options.episodes is None else [("train.episodes", options.episodes)]
        train(run, output=Path(folder) / "run", overrides=overrides, hooks=[clock])
    share = sum(clock.seconds.values()) / clock.wall
    print(f"| part | s of {clock.wall:.1f} | share |\n|---|---|---|")
    for part, seconds in clock.seconds.items():
        print(f"| {part} | {seconds:.3f} | {seconds / clock.wall:.2%} |")
    print(f"| together | {sum(clock.seconds.values()):.3f} | {share:.2%} |")
    return int(share > BOUND)


if __name__ == "__main__":
    sys.exit(main())
