"""Memory of full training, LoRA and QLoRA of a model folder: planned by `rlhf plan`, and the peak of an actual run.

Each case is a run of two episodes on a CPU, in a separate process: 2 prompts x 4 answers of at most 16 tokens, with a
KL penalty, so that there is a reference. PPO also trains a critic. The peak is `memory/peak_bytes` of the run, which is
the high-water mark of its process with all libraries.

    python benchmarks/adapter_memory.py recipes/smollm2/model
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA": {"lora": {"r": 16}},
    "DoRA": {"lora": {"r": 16, "dora": True}},
    "PiSSA": {"lora": {"r": 16, "init": "pissa_niter_16"}},
    "QLoRA, int8": {"lora": {"r": 16}, "quantize": "int8"},
    "QLoRA, nf4": {"lora": {"r": 16}, "quantize": "nf4"},
}
DEADLINE_SECONDS = 1800


def run_file(model: Path, algorithm: str, options: dict[str, Any], prompts: Path) -> dict[str, Any]:
    """Return the run file of a case."""
    return {
        "model": {"path": str(model), "device": "cpu", **options},
        "prompts": {"name": "jsonl", "path": str(prompts), "max_prompt_tokens": 64},
        "algorithm": {"name": algorithm, "kl_coef": 0.05},
        "rewards": [{"name": "length", "target_tokens": 8}],
        "engine": {"max_new_tokens": 16},
        "train": {"episodes": 2, "prompts_per_episode": 2, "samples_per_prompt": 4, "train_batch_size": 8},
        "checkpoint": {"every_episodes": None},
        "logging": {"tensorboard": False},
    }


def command(*arguments: str, threads: int) -> str:
    """Run `rlhf` and return its output. Exits with its message if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    line = [sys.executable, "-m", "rlhf_cli", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_SECONDS, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}\n{done.stderr[-3000:]}")
    return done.stdout


def measure(model: Path, algorithm: str, options: dict[str, Any], threads: int) -> tuple[float, float, float]:
    """Plan and run a case. Returns the planned and measured bytes, and the seconds of the run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [json.dumps({"prompt": f"What is {number} plus {number + 3}?"}) for number in range(16)]
        (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
        run = folder / "run.json"
        run.write_text(json.dumps(run_file(model, algorithm, options, folder / "prompts.jsonl")), encoding="utf-8")
        (planned,) = json.loads(command("plan", str(run), "--json", threads=threads))["processes"]
        started = time.perf_counter()
        command("train", str(run), "--output", str(folder / "run"), "--quiet", threads=threads)
        seconds = time.perf_counter() - started
        metrics = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        used = max(json.loads(line).get("memory/peak_bytes", 0.0) for line in metrics)
    return planned["total_bytes"], used, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--algorithms", nargs="+", default=["grpo", "ppo"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    print(f"{options.model.name}, float32, {options.threads} threads")
    print("| | | planned, GB | peak, GB | planned / peak | seconds |")
    print("|---|---|---|---|---|---|")
    for algorithm in options.algorithms:
        for case in options.cases:
            planned, used, seconds = measure(options.model.resolve(), algorithm, CASES[case], options.threads)
            cells = (algorithm, case, f"{planned / 1e9:.2f}", f"{used / 1e9:.2f}", f"{planned / used:.2f}")
            print(f"| {' | '.join(cells)} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
