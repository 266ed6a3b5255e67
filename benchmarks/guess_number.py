"""Agents that learn from feedback: `guess-number`, its controls, and a hundred numbers, as a table.

Every run uses the command. Success is the share of held-out games won within the allowed turns, greedy and sampled at
temperature 1, with each of the ten numbers equally often. `shuffled` answers higher or lower at random. `100 numbers`
plays seven turns, and its 20 test numbers never occur in training.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhf_core.plugins import load
from rlhf_start.quickstart import environment_runs

RLHF = str(Path(sys.executable).parent / "rlhf")
RUN_TIMEOUT_SECONDS = 7200
QUICKSTART = ("--environment", "guess-number")
CASES: dict[str, tuple[str, ...]] = {
    "guess-number": (),
    "guess-number, grpo": ("--algorithm", "grpo"),
    "guess-number, shuffled": ("--set", "environment.shuffle_observations=true"),
}
HUNDRED = "100 numbers, held-out targets"


@dataclass(frozen=True)
class Result:
    """Result of a run."""

    before: float
    """Greedy success before reinforcement learning."""
    after: float
    sampled: float
    seconds: float


def train(*arguments: object, output: Path, seed: int) -> None:
    """Run `rlhf train`, unless `output` contains a finished run."""
    summary = output / "summary.json"
    if summary.exists() and json.loads(summary.read_text(encoding="utf-8"))["status"] == "done":
        return
    command = [RLHF, "train", "--quiet", *map(str, arguments), "--set", f"train.seed={seed}", "--output", str(output)]
    subprocess.run(command, check=True, timeout=RUN_TIMEOUT_SECONDS)


def result(folder: Path) -> Result:
    """Read the result of a finished run."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    last = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    sampled = json.loads(last)["eval/sampled/score"]
    return Result(summary["eval_before"], summary["eval_after"], sampled, summary["wall_s"])


def hundred(folder: Path, seed: int, episodes: int) -> Result:
    """Stages of the quickstart with a hundred numbers, 20 of them held out, and seven turns."""
    warm, run = environment_runs(load("environments", "guess-number"))
    folder.mkdir(parents=True, exist_ok=True)
    prompts: dict[str, Any] = {"name": "guess-number", "numbers": 100, "max_prompt_tokens": 32}
    warm["prompts"] = {**warm["prompts"], "numbers": 100, "max_past_guesses": 6}
    warm["prompts"]["max_prompt_tokens"] = 48
    run["model"] = {"path": str(folder / "warm-start" / "model")}
    run["environment"] = {**run["environment"], "numbers": 100, "max_turns": 7}
    run["prompts"] = prompts
    run["eval"] = {**run["eval"], "num_prompts": 20}
    run["train"] = {**run["train"], "episodes": episodes}
    for name, stage in (("warm-start", warm), ("run", run)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(stage), encoding="utf-8")
        train(folder / f"{name}.yaml", output=folder / name, seed=seed)
    return result(folder / "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", nargs="+", default=[*CASES, HUNDRED], choices=[*CASES, HUNDRED])
    parser.add_argument("--episodes", type=int, default=600, help="episodes of the case with 100 numbers")
    parser.add_argument("--output", type=Path, default=Path("runs") / f"guess-number-{time.strftime('%Y%m%d-%H%M%S')}")
    options = parser.parse_args()
    print("| case | seed | greedy before | greedy after | sampled after | seconds |\n|---|---|---|---|---|---|")
    for case in options.cases:
        for seed in options.seeds:
            folder = options.output / case.replace(",", "").replace(" ", "-") / f"seed-{seed}"
            if case == HUNDRED:
                found = hundred(folder, seed, options.episodes)
            else:
                train(*QUICKSTART, *CASES[case], output=folder, seed=seed)
                found = result(folder)
            scores = f"{found.before:.3f} | {found.after:.3f} | {found.sampled:.3f}"
            print(f"| {case} | {seed} | {scores} | {found.seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
