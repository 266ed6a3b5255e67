"""Samples until the quickstart's held-out score reaches 0.9, with the plain stream and with a curriculum.

    python benchmarks/curriculum.py RESULTS.json [SEED …]

All arms of a seed start from one warm start and train with GRPO like the critic-free quickstart, with more frequent
evaluations. A run ends when it reaches the goal. Results are added to a JSON file as they are available. Needs one core
and some minutes per run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlhf_core import train
from rlhf_core.errors import RlhfError
from rlhf_start.quickstart import stage as quickstart_stage

GOAL = 0.9
EVERY_EPISODES = 5
ARMS: dict[str, dict[str, Any]] = {
    # The quickstart itself: 99,000 problems, without repetition.
    "plain": {"name": "sort-digits", "max_prompt_tokens": 32},
    # 1,000 problems, which repeat: in the stream's order, or without those always or never solved.
    "few": {"name": "sort-digits", "size": 2000, "max_prompt_tokens": 32},
    "curriculum": {
        "name": "sort-digits",
        "size": 2000,
        "max_prompt_tokens": 32,
        "curriculum": {"success": [0.05, 0.95], "revisit_after": 4, "newest_share": 0.7},
    },
}


class Reached(RlhfError):
    """Raised to end a run."""


class Watch:
    """Record the held-out scores, and end the run at the goal."""

    def __init__(self) -> None:
        self.scores: list[tuple[int, float]] = []

    def rlhf_eval_end(self, step: int, metrics: dict[str, float] | None) -> None:
        score = (metrics or {}).get("eval/score", 0.0)
        self.scores.append((step, score))
        if score >= GOAL:
            raise Reached("the goal is reached")


def main() -> None:
    results = Path(sys.argv[1])
    done: list[dict[str, Any]] = json.loads(results.read_text()) if results.exists() else []
    for seed in [int(each) for each in sys.argv[2:]] or [0, 1, 2]:
        with tempfile.TemporaryDirectory() as folder:
            warm = quickstart_stage("warm-start")
            warm["train"]["seed"] = seed
            train(warm, output=Path(folder) / "warm")
            for arm, prompts in ARMS.items():
                done.append(run_arm(arm, prompts, seed, Path(folder)))
                results.write_text(json.dumps(done, indent=1))
                print(json.dumps(done[-1]), flush=True)


def run_arm(arm: str, prompts: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """Run one arm until the goal, or to its end."""
    run = quickstart_stage("critic-free")
    run["model"]["path"] = str(folder / "warm" / "model")
    run["prompts"] = prompts
    run["eval"]["every_episodes"] = EVERY_EPISODES
    run["train"]["seed"] = seed
    run["checkpoint"] = {"every_episodes": None}
    run["logging"] = {"tensorboard": False, "samples": "none"}
    watch = Watch()
    try:
        train(run, output=folder / arm, hooks=[watch])
    except RlhfError as error:
        if "the goal is reached" not in str(error):
            raise
    per_update = run["train"]["train_batch_size"]
    step, score = watch.scores[-1]
    return {
        "arm": arm,
        "seed": seed,
        "samples": step * per_update,
        "reached": score >= GOAL,
        "scores": [(at * per_update, value) for at, value in watch.scores],
    }


if __name__ == "__main__":
    main()
