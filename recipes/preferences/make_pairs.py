"""Makes preference pairs from the answers of a run and the scores of its verifier.

    .venv/bin/python recipes/preferences/make_pairs.py runs/grpo-sums --to recipes/preferences

For each prompt, answers that are correct according to the reward `final-number` are paired with wrong ones. A share of
the prompts is reserved for `pairs-held-out.jsonl`, and all others go to `pairs.jsonl`.
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


def pairs_of(samples: Iterable[Mapping[str, Any]], reward: str, most: int, seed: int) -> dict[str, list[Pair]]:
    """Return prompt -> at most `most` pairs of a correct and a wrong answer, without truncated answers."""
    answers: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for sample in samples:
        if sample["finish_reason"] == "stop":
            answers[sample["prompt"]][sample["rewards"][reward] < 1].add(sample["completion"])
    draw = random.Random(seed)
    found = {}
    for prompt in sorted(answers):
        pairs = sorted(product(*answers[prompt]))
        if pairs:
            drawn = draw.sample(pairs, min(most, len(pairs)))
            found[prompt] = [{"prompt": prompt, "chosen": right, "rejected": wrong} for right, wrong in drawn]
    return found


def main() -> None:
    """Read the run's samples and write both files. Exit code 2 if there are no samples or no pairs."""
    parser = argparse.ArgumentParser(description="Preference pairs from a run's samples.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent, metavar="DIR", help="target folder")
    parser.add_argument("--reward", default="final-number", help="the reward that is 1 for a correct answer")
    parser.add_argument("--most", type=int, default=6, help="maximum pairs per prompt")
    parser.add_argument("--held-out", type=float, default=0.25, help="share of held-out prompts")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    samples = given.run / "samples.jsonl"
    if not samples.is_file():
        print(f"make_pairs.py: {samples} is missing: name a run folder, as rlhf train wrote it", file=sys.stderr)
        sys.exit(2)
    with samples.open(encoding="utf-8") as lines:
        found = pairs_of((json.loads(line) for line in lines), given.reward, given.most, given.seed)
    prompts = sorted(found)
    random.Random(given.seed).shuffle(prompts)
    number = round(len(prompts) * given.held_out)
    given.to.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("pairs-held-out.jsonl", prompts[:number]), ("pairs.jsonl", prompts[number:])):
        pairs = [pair for prompt in chosen for pair in found[prompt]]
        text = "".join(json.dumps(pair) + "\n" for pair in pairs)
        (given.to / name).write_text(text, encoding="utf-8")
        print(f"wrote {given.to / name}: {len(pairs)} pairs to {len(chosen)} prompts")
    if not prompts:
        print(f"make_pairs.py: no prompt has answers both right and wrong by {given.reward}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
