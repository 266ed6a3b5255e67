"""Peak memory and time of GRPO on a real model by tokens per pass (`train.micro_batch_tokens`).

Each setting runs in a separate process and trains all weights, with 8 prompts and 8 answers of at most 24 tokens each.
The last line is one JSON object. Measured with the folder of `recipes/smollm2/fetch.py`:

    python benchmarks/pass_tokens.py recipes/smollm2/model
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

BOUNDS = (128, 256, 512, 1024)
BASELINE = 1024


def write_prompts(path: Path) -> None:
    """Write sums of two-digit numbers as chats."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(64):
            one, other = draw.randint(0, 9), draw.randint(0, 9)
            message = {"role": "user", "content": f"What is {one} + {other}?"}
            file.write(json.dumps({"messages": [message], "answer": str(one + other)}) + "\n")


def run_file(model: Path, prompts: Path, tokens: int, episodes: int) -> dict[str, object]:
    """Run file that trains every weight, without evaluation."""
    return {
        "model": {"path": str(model)},
        "prompts": {"name": "jsonl", "path": str(prompts), "max_prompt_tokens": 64},
        "eval": {"num_prompts": 0},
        "rewards": [{"name": "exact-match"}],
        "algorithm": {"name": "grpo", "kl_coef": 0.0},
        "optimizer": {"lr": 1e-5},
        "engine": {"max_new_tokens": 24},
        "train": {
            "episodes": episodes,
            "prompts_per_episode": 8,
            "samples_per_prompt": 8,
            "train_batch_size": 64,
            "micro_batch_tokens": tokens,
        },
    }


def measure(model: Path, tokens: int, episodes: int) -> dict[str, float]:
    """Peak bytes of the process, and seconds of the last episode's update."""
    with tempfile.TemporaryDirectory() as folder:
        prompts, config, out = Path(folder, "prompts.jsonl"), Path(folder, "run.json"), Path(folder, "out")
        write_prompts(prompts)
        config.write_text(json.dumps(run_file(model, prompts, tokens, episodes)))  # JSON is YAML
        command = [str(Path(sys.executable).parent / "rlhf"), "train", "--quiet", str(config), "--output", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    return {"peak_gb": last["memory/peak_bytes"] / 1e9, "update_s": last["time/train_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--bounds", type=int, nargs="+", default=list(BOUNDS))
    parser.add_argument("--episodes", type=int, default=2)
    options = parser.parse_args()
    found = {tokens: measure(options.model, tokens, options.episodes) for tokens in options.bounds}
    base = found.get(BASELINE, next(iter(found.values())))
    print("| tokens a pass | peak, GB | ratio | update, s | ratio |\n|---|---|---|---|---|")
    for tokens, each in found.items():
        ratios = {key: each[key] / base[key] for key in base}
        print(
            f"| {tokens:,} | {each['peak_gb']:.2f} | {ratios['peak_gb']:.2f} "
            f"| {each['update_s']:.1f} | {ratios['update_s']:.2f} |"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
