"""Throughput of a detached run compared with the same run in one process, and idle times.

    python benchmarks/detached.py [--episodes 20] [--prompts 64]

Uses the quickstart's task and model with random weights, since only the machinery is measured. The first quarter of the
episodes is warm-up and excluded. Prints samples per second as a ratio to local, the share of the wall time in which
trainer and makers were idle, the waiting time of finished groups, and the duration of a sync.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from rlhf_core import train

PLACES: dict[str, dict[str, Any] | str] = {
    "local": "local",
    "1 x 1, staleness 0": {"name": "ray", "max_staleness": 0},
    "1 x 1, staleness 1": {"name": "ray", "max_staleness": 1},
    "2 x 1, staleness 1": {"name": "ray", "num_makers": 2, "max_staleness": 1},
}


class Clock:
    """End time of each episode, measured in this process."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def rlhf_episode_end(self, episode: int) -> None:
        self.ends.append(time.perf_counter())


def measure(place: dict[str, Any] | str, episodes: int, prompts: int, folder: Path) -> dict[str, float]:
    """Seconds per episode, and means of the run's own metrics over the measured episodes."""
    run = {
        "model": {"path": "builtin:tiny-digits"},
        "prompts": {"name": "sort-digits"},
        # The same work in all runs: with stale samples, a run would make one more forward.
        "algorithm": {"name": "ppo", "importance_cap": None},
        "engine": {"max_new_tokens": 16},
        "train": {
            "episodes": episodes,
            "prompts_per_episode": prompts,
            "samples_per_prompt": 4,
            "train_batch_size": prompts * 2,
        },
        "logging": {"tensorboard": False, "samples": "none"},
        "checkpoint": {"every_episodes": None},
        "transport": place,
    }
    clock = Clock()
    result = train(run, output=folder, hooks=[clock])
    assert result is not None
    first = episodes // 4
    seconds = (clock.ends[-1] - clock.ends[first]) / (episodes - 1 - first)
    lines = [line for line in result.metrics if line["episode"] > first]
    last = [line for line in lines if "time/train_s" in line]
    figures = {"seconds": seconds}
    for key in ("transport/trainer_wait_s", "transport/maker_idle_fraction", "transport/queue_s", "sync/seconds"):
        figures[key] = mean(line.get(key, 0.0) for line in last)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=64)
    arguments = parser.parse_args()
    print("| | samples/s, ratio to local | trainer idle | makers idle | queue, of an episode | sync, of an episode |")
    print("|---|---|---|---|---|---|")
    local: float | None = None
    with tempfile.TemporaryDirectory(prefix="rlhf-detached-") as scratch:
        for number, (name, place) in enumerate(PLACES.items()):
            figures = measure(place, arguments.episodes, arguments.prompts, Path(scratch) / str(number))
            seconds = figures["seconds"]
            local = local or seconds
            idle = "" if place == "local" else f"{figures['transport/trainer_wait_s'] / seconds:.0%}"
            makers = "" if place == "local" else f"{figures['transport/maker_idle_fraction']:.0%}"
            queue = "" if place == "local" else f"{figures['transport/queue_s'] / seconds:.0%}"
            sync = "" if place == "local" else f"{figures['sync/seconds'] / seconds:.1%}"
            print(f"| {name} | {local / seconds:.2f} x | {idle} | {makers} | {queue} | {sync} |", flush=True)


if __name__ == "__main__":
    main()
