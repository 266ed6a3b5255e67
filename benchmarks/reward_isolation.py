"""Cost of `isolate` for a reward: the quickstart's PPO stage with `regex` as its reward, with and without a process.

Runs of both kinds take turns. The time of their episodes is compared, without the first of each run, in which the
reward's process starts. Exits with 1 above the bound of 5%, which holds on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rlhf_core import train
from rlhf_start.quickstart import stage as quickstart_stage

BOUND = 0.05
SORTED = "0*1*2*3*4*5*6*7*8*9*"
"""Matches sorted digits, nearly the quickstart's own reward."""


class Stopwatch:
    """Seconds of each episode."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def rlhf_episode_start(self, episode: int) -> None:
        self._started = time.perf_counter()

    def rlhf_episode_end(self, episode: int) -> None:
        self.seconds.append(time.perf_counter() - self._started)


def seconds_per_episode(isolate: bool, episodes: int) -> float:
    watch = Stopwatch()
    run = quickstart_stage("ppo")
    run["rewards"] = [{"name": "regex", "pattern": SORTED, "mode": "fullmatch", "isolate": isolate}]
    overrides = [("train.episodes", episodes), ("eval.every_episodes", None)]
    with tempfile.TemporaryDirectory() as folder:
        train(run, output=Path(folder) / "run", overrides=overrides, hooks=[watch])
    return statistics.mean(watch.seconds[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ratios = []
    print("| round | in the run, s an episode | in a process, s an episode | ratio |\n|---|---|---|---|")
    for number in range(options.rounds):
        here, there = (seconds_per_episode(isolate, options.episodes) for isolate in (False, True))
        ratios.append(there / here)
        print(f"| {number} | {here:.3f} | {there:.3f} | {ratios[-1]:.3f} |", flush=True)
    median = statistics.median(ratios)
    print(f"median {median:.3f}")
    return int(median > 1 + BOUND)


if __name__ == "__main__":
    sys.exit(main())
