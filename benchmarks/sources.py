"""Learning with several sources of loss on the quickstart's task, next to plain `grpo`, as a table.

Each cell is a separate run of the command: the score before and after on 1,000 held-out problems (greedy exact match).
All runs of one seed start from one warm start. `records` are 256 solved problems. Finished runs are not repeated: pass
the folder of an interrupted table as `--output` to continue it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RUN_TIMEOUT_SECONDS = 3600
NUM_RECORDS = 256

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "grpo, imitation 0.1": ("grpo", {"imitation": {"coef": 0.1, "min_score": 1.0}}),
    "grpo, preference 0.1": ("grpo", {"preference": {"coef": 0.1}}),
    "grpo, records 0.1": ("grpo", {"records": {"coef": 0.1}}),
    "rejection-sampling, best 1": ("rejection-sampling", {}),
    "rejection-sampling, all right ones": ("rejection-sampling", {"imitation": {"best": None, "min_score": 1.0}}),
    "online-dpo": ("online-dpo", {}),
    "online-dpo, imitation 0.2": ("online-dpo", {"imitation": {"coef": 0.2}}),
    "online-dpo, reference_every 10": ("online-dpo", {"reference_every": 10}),
    "grpo, kl_coef 0.04": ("grpo", {"kl_coef": 0.04}),
    "grpo, kl_coef 0.04, reference_every 10": ("grpo", {"kl_coef": 0.04, "reference_every": 10}),
}
"""Name -> algorithm, and its options."""
LEARNING_RATES = {"online-dpo": 1e-4}
"""Algorithm -> learning rate, if it is not the one of the quickstart (3e-4)."""


def summary(folder: Path) -> dict[str, Any]:
    """Summary of a run that ended as expected, otherwise empty."""
    path = folder / "summary.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found if found.get("status") == "done" else {}


def write_records(path: Path) -> None:
    """Write solved problems like those of the task."""
    draw = random.Random(0)
    problems = ["".join(draw.choices("0123456789", k=8)) for _ in range(NUM_RECORDS)]
    lines = [json.dumps({"prompt": f"{each}>", "completion": "".join(sorted(each))}) for each in problems]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(variant: str, seed: int, episodes: int, root: Path) -> tuple[float, float]:
    """Train, unless the run is already finished, and return the scores before and after."""
    algorithm, options = VARIANTS[variant]
    folder = root / f"{list(VARIANTS).index(variant)}-{algorithm}-{seed}"
    if not summary(folder):
        shutil.rmtree(folder, ignore_errors=True)
        warm_start, records = root / f"warm-start-{seed}", root / "records.jsonl"
        if warm_start.exists():
            shutil.copytree(warm_start, folder / "warm-start")
        if "records" in options:
            write_records(records)
            options = {**options, "records": {**options["records"], "path": str(records)}}
        sets: dict[str, Any] = {"train.seed": seed, "train.episodes": episodes, "eval.every_episodes": episodes}
        if algorithm in LEARNING_RATES:
            sets["optimizer.lr"] = LEARNING_RATES[algorithm]
        sets |= {"checkpoint.every_episodes": "null", **{f"algorithm.{key}": value for key, value in options.items()}}
        command = [str(Path(sys.executable).parent / "rlhf"), "train", "--algorithm", algorithm, "--quiet"]
        for key, value in sets.items():
            command += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
        subprocess.run([*command, "--output", str(folder)], check=True, timeout=RUN_TIMEOUT_SECONDS)
        if not warm_start.exists():
            shutil.copytree(folder / "warm-start", warm_start)
    found = summary(folder)
    return float(found["eval_before"]), float(found["eval_after"])


def table(results: dict[str, list[tuple[float, float]]]) -> str:
    """Markdown table of variant x seeds."""
    lines = ["| algorithm | score of each seed, before→after |", "|---|---|"]
    for variant, seeds in results.items():
        lines.append(f"| {variant} | {' '.join(f'{before:.3f}→{after:.3f}' for before, after in seeds)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=120, help="episodes per run")
    parser.add_argument("--output", type=Path, default=Path("runs") / f"sources-{time.strftime('%Y%m%d-%H%M%S')}")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    results = {
        variant: [run(variant, seed, options.episodes, options.output.resolve()) for seed in options.seeds]
        for variant in options.variants
    }
    print(table(results))


if __name__ == "__main__":
    main()
