"""Two environments in one run, next to each alone with the same number of its own samples.

`games` is `guess-number`. In `larger` the policy replies with the larger of two digits. Both start from the warm start
of `guess-number`. The run of both is repeated across a resume and over Ray. The scores are the
mean reward of the sampled episodes, over the last five training episodes, and the greedy reward on held-out tasks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import turn_credit
import yaml

from rlhf_core import train
from rlhf_core.errors import RlhfError
from rlhf_core.plugins import load
from rlhf_start.quickstart import environment_runs

RLHF = str(Path(sys.executable).parent / "rlhf")
RUN_TIMEOUT_SECONDS = 7200
GAMES: dict[str, Any] = {"name": "guess-number", "max_turns": 4}
LARGER: dict[str, Any] = {"name": f"{Path(__file__).resolve().with_name('larger.py')}:Larger", "max_turns": 1}
BOUND = 0.03


class StopAt:
    """Ends a run once an episode has finished."""

    def __init__(self, episode: int) -> None:
        self._episode = episode

    def rlhf_episode_end(self, episode: int) -> None:
        if episode == self._episode:
            raise RlhfError("stopped by the benchmark")


def is_done(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.exists() and json.loads(summary.read_text(encoding="utf-8"))["status"] == "done"


def start(run: dict[str, Any], folder: Path, seed: int) -> None:
    """Run `rlhf train`, unless the folder contains a finished run."""
    if is_done(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(dict(run)), encoding="utf-8")
    command = [RLHF, "train", "--quiet", "--trust", str(path), "--set", f"train.seed={seed}", "--output", str(folder)]
    subprocess.run(command, check=True, timeout=RUN_TIMEOUT_SECONDS)


def across_a_resume(run: dict[str, Any], folder: Path, seed: int) -> None:
    """Stop the run in its middle, then resume it."""
    if is_done(folder):
        return
    seeded = {**run, "train": {**run["train"], "seed": seed}, "checkpoint": {"every_episodes": 1, "keep": 1}}
    try:
        train(seeded, output=folder, hooks=[StopAt(run["train"]["episodes"] // 2 - 1)])
    except RlhfError as error:
        if "stopped by the benchmark" not in str(error):
            raise
    train(seeded, output=folder, resume="auto")


def scores(folder: Path) -> dict[str, tuple[float, float]]:
    """Label -> sampled and greedy score after training."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        label: (
            turn_credit.scores(lines, f"environment/{label}/reward")[-1],
            lines[-1][f"eval/environment/{label}/reward"],
        )
        for label in ("games", "larger")
        if f"eval/environment/{label}/reward" in lines[-1]
    }


def text(found: tuple[float, float], alone: tuple[float, float]) -> str:
    """One cell of the table."""
    sampled, greedy = found
    return f"{sampled:.3f} ({greedy:.3f})" + (" below" if sampled < alone[0] - BOUND else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=64, help="prompts of each environment per episode")
    parser.add_argument("--output", type=Path, default=Path("runs") / f"several-{time.strftime('%Y%m%d-%H%M%S')}")
    options = parser.parse_args()
    warm, base = environment_runs(load("environments", "guess-number"))
    print("| seed | run | games: sampled (greedy) | larger: sampled (greedy) |\n|---|---|---|---|")
    for seed in options.seeds:
        folder = options.output / f"seed-{seed}"
        start(warm, folder / "warm-start", seed)

        def of(
            environments: dict[str, Any], *, base: dict[str, Any] = base, folder: Path = folder, **more: Any
        ) -> dict[str, Any]:
            number = len(environments)
            return {
                **base,
                "model": {"path": str(folder / "warm-start" / "model")},
                "environment": {"name": "several", "of": environments, "concurrency": 512},
                "eval": {"every_episodes": None, "num_prompts": 200 * number, "batch_size": 200},
                "train": {
                    **base["train"],
                    "episodes": options.episodes,
                    "prompts_per_episode": options.prompts * number,
                    "train_batch_size": base["train"]["train_batch_size"] * number,
                },
                **more,
            }

        both = {"games": GAMES, "larger": LARGER}
        start(of({"games": GAMES}), folder / "games", seed)
        start(of({"larger": LARGER}), folder / "larger", seed)
        start(of(both), folder / "both", seed)
        across_a_resume(of(both), folder / "resumed", seed)
        ray = {"name": "ray", "num_makers": 2, "max_staleness": 0}
        start(of(both, transport=ray), folder / "ray", seed)
        alone = scores(folder / "games") | scores(folder / "larger")
        runs = {"alone": alone} | {name: scores(folder / name) for name in ("both", "resumed", "ray")}
        for name, found in runs.items():
            cells = " | ".join(text(found[label], alone[label]) for label in alone)
            print(f"| {seed} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
