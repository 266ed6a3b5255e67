"""Compare the metrics of short runs with those of another checkout, bit for bit: `same_metrics.py OTHER_CHECKOUT`.

Both checkouts need a `.venv` (`make setup`). Each run is started in both, and its `metrics.jsonl` is compared except
for times, throughput and memory: the quickstart (in this process, in two ddp processes, over Ray without staleness),
guess-number, DPO and distillation. Use it after a change that must not change results.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SKIPPED = ("time/", "tokens_per_second/", "memory/", "transport/", "sync/", "reward_calls/")
EPISODES = "--set=train.episodes=3"
SECONDS = 600.0
QUICKSTART: dict[str, list[str]] = {
    "local": ["--algorithm", "ppo"],
    "ddp": ["--strategy", "ddp", "--num-processes", "2"],
    "ray": ["--transport", "ray", "--set", "transport.max_staleness=0"],
    "guess-number": ["--environment", "guess-number"],
}


def run(checkout: Path, output: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """Run with one checkout and return its comparable metrics. Exits with the run's output if it fails."""
    command = [str(checkout / ".venv/bin/rlhf"), "train", *arguments, EPISODES, "--output", str(output), "--quiet"]
    done = subprocess.run(command, cwd=output.parent, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(SKIPPED)} for line in lines]


def differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    """One line for each value that differs."""
    found = [] if len(ours) == len(theirs) else [f"{len(ours)} lines here, {len(theirs)} there"]
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        found += [
            f"line {number}: {key}: {a.get(key)} here, {b.get(key)} there"
            for key in sorted({*a, *b})
            if a.get(key) != b.get(key)
        ]
    return found


def data_runs(folder: Path, model: Path) -> dict[str, list[str]]:
    """Run files of DPO and distillation, on pairs and prompts written to `folder`. `model` is the folder of a digit
    model.
    """
    rng = random.Random(0)
    pairs, prompts = folder / "pairs.jsonl", folder / "prompts.jsonl"
    digits = ["".join(rng.choices("0123456789", k=8)) for _ in range(256)]
    pairs.write_text(
        "".join(json.dumps({"prompt": f"{d}>", "chosen": "".join(sorted(d)), "rejected": d}) + "\n" for d in digits)
    )
    prompts.write_text("".join(json.dumps({"prompt": f"{d}>", "answer": "".join(sorted(d))}) + "\n" for d in digits))
    common = {"model": {"path": str(model)}, "train": {"prompts_per_episode": 32, "train_batch_size": 32}}
    runs: dict[str, Any] = {
        "dpo": common | {"prompts": {"name": "jsonl", "path": str(pairs)}, "algorithm": "dpo"},
        "distill": common
        | {
            "prompts": {"name": "jsonl", "path": str(prompts)},
            "model": {"path": "builtin:tiny-digits"},
            "algorithm": {"name": "distill", "teacher": {"path": str(model)}},
            "engine": {"name": "hf", "max_new_tokens": 10},
            "rewards": ["exact-match"],
        },
    }
    for name, content in runs.items():
        (folder / f"{name}.yaml").write_text(json.dumps(content))  # JSON is YAML
    return {name: [str(folder / f"{name}.yaml")] for name in runs}


def main() -> int:
    """Print each difference. Exit with 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="another checkout of this repository, with its .venv")
    parser.add_argument("--only", action="append", help="name of a run, may be repeated")
    options = parser.parse_args()
    here = Path(__file__).resolve().parents[1]
    failed = 0
    with TemporaryDirectory() as name:
        folder = Path(name)
        warm = folder / "warm"
        run(here, warm, QUICKSTART["local"])
        for run_name, arguments in (QUICKSTART | data_runs(folder, warm / "model")).items():
            if options.only and run_name not in options.only:
                continue
            found = differences(
                run(here, folder / f"{run_name}-here", arguments),
                run(options.other.resolve(), folder / f"{run_name}-there", arguments),
            )
            print(f"{run_name}: {'the same' if not found else f'{len(found)} differences'}", *found[:10], sep="\n  ")
            failed += bool(found)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
