"""Slow tools: 64 concurrent episodes whose calls take 0 to 2 seconds, compared with the slowest episode alone.

Every episode calls a tool after each of its turns. The duration of each call is drawn from the episode's seed. The
slowest chain is the largest sum of one episode's calls, a lower bound for any engine and schedule. The engine's idle
share is its time waiting for environments, relative to the rollout. Prefilled tokens are those of a turn's prefix,
which the engine processes again for every turn. The last column is the share already processed in an earlier turn.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from rlhf_core import train

EPISODES = 64
TURNS = 4
LONGEST_CALL_SECONDS = 2.0
BOUND = 1.3


class SlowTool:
    """Sleeps in each step, as a plain function, and records the duration."""

    def __init__(self, *, log: str = "") -> None:
        self._log = Path(log)

    def reset(self, task: Any) -> str:
        self._random = Random(task.sample_seed)
        self._slept = 0.0
        self._turns = 0
        return "12>"

    def step(self, reply: Any) -> tuple[str, float, bool]:
        seconds = self._random.uniform(0.0, LONGEST_CALL_SECONDS)
        time.sleep(seconds)
        self._slept += seconds
        self._turns += 1
        done = self._turns == TURNS
        if done:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"{self._slept}\n")
        return "3>", 0.0, done


def measure(folder: Path, seed: int) -> dict[str, float]:
    """Play one episode of the loop: all 64 games once."""
    log = folder / "slept"
    run = {
        "model": {"path": "builtin:tiny-digits", "device": "cpu"},
        "environment": {"name": f"{__file__}:SlowTool", "max_turns": TURNS, "concurrency": EPISODES, "log": str(log)},
        "algorithm": {"name": "reinforce++"},
        "engine": {"name": "hf", "max_new_tokens": 16, "max_batch_size": EPISODES},
        "eval": None,
        "train": {
            "episodes": 2,  # warm-up, in which the player also detects that calls take time
            "prompts_per_episode": EPISODES,
            "samples_per_prompt": 1,
            "train_batch_size": EPISODES,
            "seed": seed,
        },
        "logging": {"tensorboard": False, "samples": "all"},
    }
    result = train({key: value for key, value in run.items() if value is not None}, output=folder / "run", trust=True)
    slept = [float(line) for line in log.read_text(encoding="utf-8").split()]
    slowest = max(slept[EPISODES:])
    last = result.metrics[-1]
    rollout = last["time/rollout_s"] + last["time/environment_s"]
    passed, again = prefilled(folder / "run" / "samples.jsonl")
    return {
        "slowest": slowest,
        "all": rollout,
        "ratio": rollout / slowest,
        "one_by_one": sum(slept[EPISODES:]),
        "idle": last["time/environment_s"] / rollout,
        "prefilled": passed,
        "again": again,
    }


def prefilled(samples: Path) -> tuple[float, float]:
    """Tokens prefilled per episode, and the share already processed in an earlier turn of the same episode."""
    passed = again = 0
    lines = samples.read_text(encoding="utf-8").splitlines()
    for line in lines:
        sample = json.loads(line)
        length = len(sample["prompt"])  # the tiny model has one token per character
        before = 0
        for turn in sample["turns"]:
            if turn["role"] == "policy":
                passed, again, before = passed + length, again + before, length
            length += len(turn["text"])
    return passed / len(lines), again / passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    print("| seed | slowest chain, s | 64 episodes, s | ratio | one by one, s | idle | prefilled | seen before |")
    print("|---|---|---|---|---|---|---|---|")
    worst = 0.0
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), seed)
        worst = max(worst, found["ratio"])
        times = f"{found['slowest']:.2f} | {found['all']:.2f} | {found['ratio']:.2f} | {found['one_by_one']:.0f}"
        tokens = f"{found['idle']:.2f} | {found['prefilled']:.0f} | {found['again']:.2f}"
        print(f"| {seed} | {times} | {tokens} |", flush=True)
    if worst > BOUND:
        raise SystemExit(f"{worst:.2f} is more than {BOUND}")


if __name__ == "__main__":
    main()
