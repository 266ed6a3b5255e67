"""Speed and peak memory of a step on preference pairs with a real model: this project compared with TRL, in turn.

Both start from the same model folder and use the same pairs in the same order, 8 per step, without repetition, with
answers of 40 to 120 tokens. For DPO (--kind dpo) both hold a reference with the same weights, compute its log-probs in
the step, and use the same beta. A reward model (--kind reward-model) starts from a head of zeros on both sides. Both
make one AdamW step of all weights in float32, without gradient clipping. TRL's steps are measured with several pass
sizes, and with its smallest memory, pair by pair with gradient checkpointing. Ours use the default. The table is
followed by the losses and margins of every step of both sides, which agree if both did the same work.

TRL runs in its own environment:

    python3 -m venv peer && peer/bin/pip install torch==2.13.0 transformers==5.19.0 trl==1.16.0
    python benchmarks/peers/compare_dpo.py --peer-python peer/bin/python --model recipes/smollm2/model
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from dpo_inputs import KINDS, make_pairs, write_pairs
from turns import compare, option_parser, sides

from rlhf_core.util.rng import prompt_order

SEED = 0


def main() -> None:
    parser = option_parser(__doc__, [8, 4, 2])
    parser.add_argument("--kind", choices=KINDS, default="dpo")
    parser.add_argument("--pairs", type=int, default=8, help="pairs per step")
    parser.add_argument("--prompt-words", type=int, default=0, help="words before each question, about a token each")
    options = parser.parse_args()
    pairs = list(make_pairs(options.pairs * (options.iterations + 2), prompt_words=options.prompt_words))
    with tempfile.TemporaryDirectory() as folder:
        write_pairs(Path(folder), pairs, prompt_order(len(pairs), SEED, 0))
        work = ["--kind", options.kind, "--model", str(options.model)]
        work += ["--inputs", folder, "--pairs", str(options.pairs)]
        commands = sides(options, work, "run_rlhf_dpo.py", "run_trl_dpo.py")
        commands["rlhf"] += ["--seed", str(SEED)]
        found = compare(options, commands, f"{options.kind}, {options.pairs} pairs a step")
    for key in ("losses", "margins"):
        for side, runs in found.items():
            print(f"{key} of {side}: {' '.join(f'{value:.5f}' for value in runs[0][key])}")


if __name__ == "__main__":
    main()
