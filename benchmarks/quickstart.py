"""The quickstart on several seeds, as a table: `make bench`.

Each seed is a separate run of the command, so that the same work as in `make train` is measured. Arguments after `--`
are passed to `rlhf train`: `benchmarks/quickstart.py -- --environment guess-number`. `--plot FILE` draws the curve of
the first seed, as in docs/images/quickstart.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RUN_TIMEOUT_SECONDS = 1800


def run(seed: int, folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Train with one seed into `folder` and return its summary."""
    command = [str(Path(sys.executable).parent / "rlhf"), "train", "--quiet", *arguments]
    command += ["--set", f"train.seed={seed}", "--output", str(folder)]
    subprocess.run(command, check=True, timeout=RUN_TIMEOUT_SECONDS)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


def table(summaries: dict[int, dict[str, Any]]) -> str:
    """Markdown table of seed, held-out score before and after PPO, and seconds, with the medians last."""
    keys = ("eval_before", "eval_after", "wall_s")
    rows = [(str(seed), *(summary[key] for key in keys)) for seed, summary in summaries.items()]
    rows.append(("median", *(statistics.median(summary[key] for summary in summaries.values()) for key in keys)))
    lines = ["| seed | score before | score after | seconds |", "|---|---|---|---|"]
    lines += [f"| {seed} | {before:.3f} | {after:.3f} | {wall:.0f} |" for seed, before, after, wall in rows]
    return "\n".join(lines)


def draw(folder: Path, target: Path) -> None:
    """Draw the reward of sampled answers and the held-out score of a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    before = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["eval_before"]
    scores = [(0, before)] + [(line["step"], line["eval/score"]) for line in lines if "eval/score" in line]
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    rewards = [line["reward/mean"] for line in lines]
    axes.plot([line["step"] for line in lines], rewards, color="#9ab8d8", label="reward of sampled answers")
    axes.plot(*zip(*scores, strict=True), "o-", color="#1c4f8f", linewidth=2.2, label="held-out exact match, greedy")
    axes.set(xlabel="update", ylabel="score", xlim=(0, lines[-1]["step"]), ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(target, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("runs") / f"bench-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve of the first seed into FILE")
    parser.add_argument("arguments", nargs="*", help="arguments of rlhf train, after --")
    options = parser.parse_args()
    print(table({seed: run(seed, options.output / f"seed-{seed}", options.arguments) for seed in options.seeds}))
    if options.plot is not None:
        draw(options.output / f"seed-{options.seeds[0]}", options.plot)


if __name__ == "__main__":
    main()
