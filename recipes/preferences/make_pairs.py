"""Create preference pairs from the answers of a run and their verifier's scores.

    .venv/bin/python recipes/preferences/make_pairs.py runs/grpo-sums --to recipes/preferences

For each prompt, answers that the reward `final-number` scores as right are paired with those it scores as wrong. A
share of the prompts goes to `pairs-held-out.jsonl`, the rest to `pairs.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

Pair = dict[str, str]


def pairs_of(samples: Iterable[Mapping[str, Any]], reward: str, limit: int, seed: int) -> dict[str, list[Pair]]:
    """Pairs of a right and a wrong answer by prompt, at most `limit` each. Truncated answers are skipped."""
    answers: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for sample in samples:
        if sample["finish_reason"] == "stop":
            answers[sample["prompt"]][sample["rewards"][reward] < 1].add(sample["completion"])
    draw = random.Random(seed)
    by_prompt = {}
    for prompt in sorted(answers):
        pairs = sorted(product(*answers[prompt]))
        if pairs:
            sampled = draw.sample(pairs, min(limit, len(pairs)))
            by_prompt[prompt] = [{"prompt": prompt, "chosen": right, "rejected": wrong} for right, wrong in sampled]
    return by_prompt


def main() -> None:
    """Read the run's samples and write both files. Exit code 2 if no pair can be made."""
    parser = argparse.ArgumentParser(description="Create preference pairs from a run's samples.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent, metavar="DIR", help="output folder")
    parser.add_argument("--reward", default="final-number", help="reward that is 1 for a right answer")
    parser.add_argument("--most", type=int, default=6, help="maximum pairs per prompt")
    parser.add_argument("--held-out", type=float, default=0.25, help="share of held-out prompts")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    samples = options.run / "samples.jsonl"
    if not samples.is_file():
        print(f"make_pairs.py: {samples} is missing: pass a run folder written by rlhf train", file=sys.stderr)
        sys.exit(2)
    with samples.open(encoding="utf-8") as lines:
        by_prompt = pairs_of(map(json.loads, lines), options.reward, options.most, options.seed)
    prompts = sorted(by_prompt)
    random.Random(options.seed).shuffle(prompts)
    split = round(len(prompts) * options.held_out)
    options.to.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("pairs-held-out.jsonl", prompts[:split]), ("pairs.jsonl", prompts[split:])):
        pairs = [pair for prompt in chosen for pair in by_prompt[prompt]]
        text = "".join(json.dumps(pair) + "\n" for pair in pairs)
        (options.to / name).write_text(text, encoding="utf-8")
        print(f"wrote {options.to / name}: {len(pairs)} pairs for {len(chosen)} prompts")
    if not prompts:
        print(
            f"make_pairs.py: no prompt has both right and wrong answers according to {options.reward}", file=sys.stderr
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
