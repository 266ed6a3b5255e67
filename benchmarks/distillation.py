"""Distillation compared with PPO on the quickstart task: samples until 0.9 of the teacher's held-out score, as a table.

Each seed trains the quickstart with PPO. Its final policy is the teacher of runs from the same warm start. The figure
is the number of sampled answers until an evaluation (greedy, 1,000 held-out problems) first reaches 0.9 of the
teacher's score. Finished runs are not repeated: pass the folder of an interrupted table as `--output` to continue it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RUN_TIMEOUT_SECONDS = 7200
SHARE = 0.9
PPO = "ppo"
TAUGHT = {"distill, top_k 8": (), "distill, sampled tokens": ("--set", "algorithm.top_k=0")}


def is_done(folder: Path) -> bool:
    """Whether the folder contains a run that ended as expected."""
    summary = folder / "summary.json"
    return summary.exists() and json.loads(summary.read_text(encoding="utf-8"))["status"] == "done"


def run(folder: Path, warm_start: Path | None, *arguments: str) -> None:
    """Train from the warm start, unless the run is already finished."""
    if is_done(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    if warm_start is not None:
        shutil.copytree(warm_start, folder / "warm-start")
    command = [str(Path(sys.executable).parent / "rlhf"), "train", "--quiet", *arguments, "--output", str(folder)]
    subprocess.run(command, check=True, timeout=RUN_TIMEOUT_SECONDS)


def curve(folder: Path) -> list[tuple[int, float]]:
    """Number of sampled answers and held-out score at each evaluation of a finished run."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    samples = len((folder / "samples.jsonl").read_text(encoding="utf-8").splitlines())
    each = samples // (1 + lines[-1]["episode"])
    return [((1 + line["episode"]) * each, line["eval/score"]) for line in lines if "eval/score" in line]


def samples_until(folder: Path, score: float) -> int | None:
    """Number of samples until the score is reached. None if no evaluation reaches it."""
    return next((samples for samples, reached in curve(folder) if reached >= score), None)


def measure(seed: int, root: Path, episodes: int) -> dict[str, Any]:
    """Run and evaluate the arms of one seed."""
    flags = ("--set", f"train.seed={seed}", "--set", "eval.every_episodes=5")
    teacher = root / f"ppo-{seed}"
    run(teacher, None, "--algorithm", PPO, *flags, "--set", f"train.episodes={episodes}")
    target = SHARE * curve(teacher)[-1][1]
    found: dict[str, Any] = {"seed": seed, "score": curve(teacher)[-1][1], PPO: samples_until(teacher, target)}
    for index, (name, options) in enumerate(TAUGHT.items()):
        folder = root / f"distill-{index}-{seed}"
        model = ("--set", f"algorithm.teacher.path={teacher / 'model'}")
        run(folder, teacher / "warm-start", "--algorithm", "distill", *flags, *model, *options)
        found[name] = samples_until(folder, target)
        found[f"{name}: score"] = curve(folder)[-1][1]
    return found


def table(results: list[dict[str, Any]]) -> str:
    """Markdown table of seed, the teacher's score, and samples until 0.9 of it (with the final score)."""
    names = list(TAUGHT)
    lines = [f"| seed | teacher (PPO) | PPO | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for each in results:
        cells = [f"{_count(each[name])} ({each[f'{name}: score']:.3f})" for name in names]
        lines.append(f"| {each['seed']} | {each['score']:.3f} | {_count(each[PPO])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _count(samples: int | None) -> str:
    return "not reached" if samples is None else f"{samples:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=60, help="episodes of PPO, by default as in the quickstart")
    parser.add_argument("--output", type=Path, default=Path("runs") / f"distill-{time.strftime('%Y%m%d-%H%M%S')}")
    options = parser.parse_args()
    results = [measure(seed, options.output.resolve(), options.episodes) for seed in options.seeds]
    (options.output / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
