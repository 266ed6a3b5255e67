"""Learning with an option on the quickstart's task, next to the plain algorithm, as tables.

Each cell is a separate run of the command: the score before and after on 1,000 held-out problems (greedy exact match).
All runs of one seed start from one warm start. Finished runs are not repeated: pass the folder of an interrupted table
as `--output` to continue it.

sources   several sources of loss next to plain `grpo`. `records` are 256 solved problems
ppo       options of PPO. `critic.path` is a reward model, trained on pairs from the same warm start
adapters  initializations and kinds of LoRA, rank 8, trained by `grpo` with two learning rates
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
RECORDS, REWARD_MODEL = "records.jsonl", "reward-model"
"""Values of options for which a file or a model is made."""

VC_PPO = {"algorithm.lam": 0.95, "algorithm.critic_lam": 1.0}
GRPO_KL, PPO_KL, REFRESHED = {"algorithm.kl_coef": 0.04}, {"algorithm.kl_coef": 0.04}, {"algorithm.reference_every": 10}


ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"rslora": True},
    "DoRA": {"dora": True},
    "PiSSA": {"init": "pissa"},
    "OLoRA": {"init": "olora"},
}


def with_adapter(options: dict[str, Any], rate: float) -> tuple[str, dict[str, Any]]:
    """A variant with an adapter of rank 8."""
    return "grpo", {"model.lora": {"r": 8, "alpha": 16.0, **options}, "optimizer.lr": rate}


TABLES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "sources": {
        "grpo": ("grpo", {}),
        "grpo, imitation 0.1": ("grpo", {"algorithm.imitation": {"coef": 0.1, "min_score": 1.0}}),
        "grpo, preference 0.1": ("grpo", {"algorithm.preference": {"coef": 0.1}}),
        "grpo, records 0.1": ("grpo", {"algorithm.records": {"coef": 0.1, "path": RECORDS}}),
        "rejection-sampling, best 1": ("rejection-sampling", {}),
        "rejection-sampling, all right ones": (
            "rejection-sampling",
            {"algorithm.imitation": {"best": None, "min_score": 1.0}},
        ),
        "online-dpo": ("online-dpo", {}),
        "online-dpo, imitation 0.2": ("online-dpo", {"algorithm.imitation": {"coef": 0.2}}),
        "online-dpo, reference_every 10": ("online-dpo", REFRESHED),
        "grpo, kl_coef 0.04": ("grpo", GRPO_KL),
        "grpo, kl_coef 0.04, reference_every 10": ("grpo", {**GRPO_KL, **REFRESHED}),
    },
    "ppo": {
        "ppo": ("ppo", {}),
        "ppo, critic_warmup_episodes 3": ("ppo", {"algorithm.critic_warmup_episodes": 3}),
        "ppo, critic.path a reward model": ("ppo", {"algorithm.critic.path": REWARD_MODEL}),
        "ppo, lam 0.95": ("ppo", {"algorithm.lam": 0.95}),
        "ppo, lam 0.95, critic_lam 1": ("ppo", VC_PPO),
        "ppo, lam_alpha 1, critic_lam 1": ("ppo", {**VC_PPO, "algorithm.lam_alpha": 1.0}),
        "ppo, kl_coef 0.04": ("ppo", PPO_KL),
        "ppo, kl_coef 0.04, reference_every 5": ("ppo", {**PPO_KL, "algorithm.reference_every": 5}),
        "ppo, kl_coef 0.04, reference_every 1, reference_mix 0.1": (
            "ppo",
            {**PPO_KL, "algorithm.reference_every": 1, "algorithm.reference_mix": 0.1},
        ),
    },
    "adapters": {
        "all weights, 0.0003": ("grpo", {}),
        **{
            f"{name}, {rate:g}": with_adapter(options, rate)
            for rate in (1e-3, 3e-3)
            for name, options in ADAPTERS.items()
        },
    },
}
"""Table -> name of a variant -> algorithm, and its options."""
EPISODES = {"sources": 120, "ppo": 60, "adapters": 120}
"""Episodes of the quickstart."""
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


def train(folder: Path, algorithm: str, sets: dict[str, Any], seed: int, root: Path) -> dict[str, Any]:
    """Train from the warm start of a seed, unless the run is already finished, and return its summary."""
    if not summary(folder):
        shutil.rmtree(folder, ignore_errors=True)
        warm_start = root / f"warm-start-{seed}"
        if warm_start.exists():
            shutil.copytree(warm_start, folder / "warm-start")
        sets = {"train.seed": seed, "checkpoint.every_episodes": "null", **sets}
        command = [str(Path(sys.executable).parent / "rlhf"), "train", "--algorithm", algorithm, "--quiet"]
        for key, value in sets.items():
            command += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
        subprocess.run([*command, "--output", str(folder)], check=True, timeout=RUN_TIMEOUT_SECONDS)
        if not warm_start.exists():
            shutil.copytree(folder / "warm-start", warm_start)
    return summary(folder)


def with_files(options: dict[str, Any], seed: int, root: Path) -> dict[str, Any]:
    """Replace the names of a file of records and of a reward model by their paths, after making them."""
    made = dict(options)
    if "algorithm.records" in made:
        write_records(root / RECORDS)
        made["algorithm.records"] = {**made["algorithm.records"], "path": str(root / RECORDS)}
    if made.get("algorithm.critic.path") == REWARD_MODEL:
        folder = root / f"{REWARD_MODEL}-{seed}"
        train(folder, "reward-model", {"train.episodes": 40}, seed, root)
        made["algorithm.critic.path"] = str(folder / "model")
    return made


def run(table: str, variant: str, seed: int, episodes: int, root: Path) -> tuple[float, float]:
    """Return the scores before and after the run of a variant."""
    algorithm, options = TABLES[table][variant]
    sets: dict[str, Any] = {"train.episodes": episodes, "eval.every_episodes": episodes}
    if algorithm in LEARNING_RATES:
        sets["optimizer.lr"] = LEARNING_RATES[algorithm]
    folder = root / table / f"{list(TABLES[table]).index(variant)}-{algorithm}-{seed}"
    found = train(folder, algorithm, sets | with_files(options, seed, root), seed, root)
    return float(found["eval_before"]), float(found["eval_after"])


def markdown(results: dict[str, list[tuple[float, float]]]) -> str:
    """Markdown table of variant x seeds."""
    lines = ["| variant | score of each seed, before→after |", "|---|---|"]
    for variant, seeds in results.items():
        lines.append(f"| {variant} | {' '.join(f'{before:.3f}→{after:.3f}' for before, after in seeds)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=list(TABLES), default="sources")
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help="rows of the table, all if not given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, help="episodes per run, those of the quickstart if not given")
    parser.add_argument("--output", type=Path, default=Path("runs") / f"variants-{time.strftime('%Y%m%d-%H%M%S')}")
    options = parser.parse_args()
    variants = options.variants or list(TABLES[options.table])
    if unknown := [name for name in variants if name not in TABLES[options.table]]:
        parser.error(f"--table {options.table} has no {unknown}, only {list(TABLES[options.table])}")
    options.output.mkdir(parents=True, exist_ok=True)
    episodes, root = options.episodes or EPISODES[options.table], options.output.resolve()
    print(
        markdown(
            {each: [run(options.table, each, seed, episodes, root) for seed in options.seeds] for each in variants}
        )
    )


if __name__ == "__main__":
    main()
