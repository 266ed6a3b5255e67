"""Samples that credit per turn needs to learn a game, next to the estimators of the whole episode.

`guess-number` has one reward, at the end. In `pairs`, the policy replies in each of four turns with the larger of two
digits, and is rewarded in each.

Each case is a run of the quickstart's second stage with another advantage estimator, on the same warm start per seed.
The target is a fraction of the final score that the estimator of the whole episode reaches with the same algorithm and
seed. The score is the mean reward of the last few episodes, sampled at temperature 1 (in `guess-number` the share of
games won, in `pairs` that of right replies).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhf_core.plugins import load
from rlhf_start.quickstart import environment_runs

RLHF = str(Path(sys.executable).parent / "rlhf")
RUN_TIMEOUT_SECONDS = 7200
WINDOW = 5
"""Episodes over which a score is averaged."""


class Pairs:
    """The larger of two digits, four times."""

    def reset(self, task: Any) -> str:
        chance = random.Random(task.seed)
        self._pairs = [(chance.randrange(10), chance.randrange(10)) for _ in range(4)]
        return self._next()

    def step(self, reply: Any) -> tuple[str | None, float, bool]:
        reward = 0.25 * (reply.text.strip() == str(max(self._pairs.pop(0))))
        return (self._next(), reward, False) if self._pairs else (None, reward, True)

    def _next(self) -> str:
        first, second = self._pairs[0]
        return f"{first}{second}>"


@dataclass(frozen=True)
class Case:
    """An estimator, and the algorithm that uses it."""

    algorithm: str
    advantage: Any
    options: dict[str, Any]

    @property
    def name(self) -> str:
        chosen = self.advantage if isinstance(self.advantage, str) else json.dumps(self.advantage).replace('"', "")
        gamma = f", turn_gamma {self.options['turn_gamma']}" if "turn_gamma" in self.options else ""
        return f"{self.algorithm}, {chosen}{gamma}"


WHOLE = {"reinforce++": Case("reinforce++", "reward-to-go", {}), "grpo": Case("grpo", "group-normalised", {})}
"""Algorithm -> its estimator of the whole episode."""
BY_TURN = (
    Case("reinforce++", {"name": "turn-to-go", "whiten_over": "turn"}, {}),
    Case("reinforce++", {"name": "turn-to-go", "whiten_over": "turn"}, {"turn_gamma": 0.8}),
    Case("grpo", "turn-normalised", {}),
    Case("grpo", "turn-normalised", {"turn_gamma": 0.0}),
    Case("grpo", {"name": "gigpo", "state": "history"}, {}),
)


def train(run: dict[str, Any], folder: Path, seed: int) -> list[dict[str, float]]:
    """Return the metrics of a run, which is started unless `folder` contains it finished."""
    summary = folder / "summary.json"
    if not (summary.exists() and json.loads(summary.read_text(encoding="utf-8"))["status"] == "done"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        path = folder.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(dict(run)), encoding="utf-8")
        command = [
            RLHF,
            "train",
            "--quiet",
            "--trust",
            str(path),
            "--set",
            f"train.seed={seed}",
            "--output",
            str(folder),
        ]
        subprocess.run(command, check=True, timeout=RUN_TIMEOUT_SECONDS)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def scores(metrics: Sequence[dict[str, float]], name: str = "reward/mean") -> list[float]:
    """Mean of a metric up to each episode, over at most `WINDOW` episodes."""
    by_episode = {line["episode"]: line[name] for line in metrics if name in line}
    rewards = [by_episode[episode] for episode in sorted(by_episode)]
    return [statistics.fmean(rewards[max(0, end - WINDOW) : end]) for end in range(1, len(rewards) + 1)]


def samples_until(found: Sequence[float], target: float, per_episode: int) -> float:
    """Samples until the score first reaches the target, infinite if it does not."""
    reached = next((number for number, score in enumerate(found, start=1) if score >= target), None)
    return float("inf") if reached is None else float(reached * per_episode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--game", choices=["guess-number", "pairs"], default="guess-number")
    parser.add_argument("--prompts", type=int, help="prompts per episode, by default those of the quickstart")
    parser.add_argument("--algorithms", nargs="+", choices=list(WHOLE), default=list(WHOLE))
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--by-turn-episodes", type=int, help="episodes of the estimators by turn, by default the same")
    parser.add_argument(
        "--fraction", type=float, default=0.9, help="of the final score of the whole episode's estimator"
    )
    parser.add_argument("--output", type=Path, default=Path("runs") / f"turn-credit-{time.strftime('%Y%m%d-%H%M%S')}")
    options = parser.parse_args()
    warm, run = environment_runs(load("environments", "guess-number"))
    run["eval"] = None
    if options.game == "pairs":
        run["environment"] = {"name": f"{Path(__file__).resolve()}:Pairs", "max_turns": 4}
    if options.prompts:
        run["train"] = {**run["train"], "prompts_per_episode": options.prompts}
    cases = [case for case in (*WHOLE.values(), *BY_TURN) if case.algorithm in options.algorithms]
    per_episode = run["train"]["prompts_per_episode"] * run["train"]["samples_per_prompt"]
    needed: dict[str, list[float]] = {}
    final: dict[str, list[float]] = {}
    for seed in options.seeds:
        folder = options.output / f"seed-{seed}"
        train(warm, folder / "warm-start", seed)
        targets: dict[str, float] = {}
        for case in cases:
            is_whole = case in WHOLE.values()
            episodes = options.episodes if is_whole else options.by_turn_episodes or options.episodes
            schedule = {**run["train"], "episodes": episodes}
            algorithm = {**run["algorithm"], "name": case.algorithm, "advantage": case.advantage, **case.options}
            model = {"path": str(folder / "warm-start" / "model")}
            name = "".join(each if each.isalnum() else "-" for each in case.name)
            found = scores(
                train({**run, "model": model, "algorithm": algorithm, "train": schedule}, folder / name, seed)
            )
            if is_whole:
                targets[case.algorithm] = options.fraction * found[-1]
            needed.setdefault(case.name, []).append(samples_until(found, targets[case.algorithm], per_episode))
            final.setdefault(case.name, []).append(found[-1])
    print(
        "| estimator | final score | samples to the target (median) | ratio to the whole episode's |\n|---|---|---|---|"
    )
    for case in cases:
        median = statistics.median(needed[case.name])
        ratio = median / statistics.median(needed[WHOLE[case.algorithm].name])
        print(f"| {case.name} | {statistics.median(final[case.name]):.3f} | {median:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
