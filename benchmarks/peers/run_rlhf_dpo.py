"""One side of `compare_dpo.py`: steps of DPO or of a reward model with `rlhf_core.train`, as in the command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from dpo_inputs import BETA, LEARNING_RATE, PAIRS_FILE, side_parser
from run_rlhf import Watch, measure


class PairWatch(Watch):
    """Tokens of the pairs of each step, its loss, and the margin of its implicit rewards."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.losses: list[float] = []
        self.margins: list[float] = []

    def rlhf_batch_start(self, experience: Any) -> None:
        self.tokens.append(sum(answer.num_tokens for pair in experience for answer in pair.answers))

    def rlhf_metrics(self, line: Mapping[str, Any]) -> None:
        self.losses.append(line["loss/policy"])
        self.margins.append(line["preference/margin"])


def run_file(options: argparse.Namespace) -> Mapping[str, Any]:
    """Run file with one AdamW step of all weights in float32 per episode, without gradient clipping. Pairs are new."""
    return {
        "model": {"path": str(options.model), "dtype": "float32"},
        "prompts": {"name": "jsonl", "path": str(options.inputs / PAIRS_FILE)},
        "algorithm": {"name": options.kind, **({"beta": BETA} if options.kind == "dpo" else {})},
        "optimizer": {"lr": LEARNING_RATE, "max_grad_norm": None},
        "strategy": {"name": "single", "precision": "fp32"},
        "train": {
            "seed": options.seed,
            "episodes": options.iterations + 2,
            "prompts_per_episode": options.pairs,
            "train_batch_size": options.pairs,
            "micro_batch_tokens": options.micro_batch_tokens,
        },
        "checkpoint": {"every_episodes": None},
        "logging": {"tensorboard": False},
    }


def main() -> None:
    parser = side_parser(__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--micro-batch-tokens", type=int)
    options = parser.parse_args()
    watch = PairWatch()
    result = measure(run_file(options), options.iterations, "cpu", watch)
    steps = slice(0, options.iterations + 1)
    print(json.dumps({**result, "losses": watch.losses[steps], "margins": watch.margins[steps]}))


if __name__ == "__main__":
    main()
