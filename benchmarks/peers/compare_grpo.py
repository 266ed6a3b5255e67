"""Speed and peak memory of a GRPO iteration with a real model: this project compared with TRL, in turn.

Both start from the same model folder and the same 8 prompts, sample 8 answers to each at temperature 1, score them with
the same Python function, and make one AdamW step of all weights in float32, without KL penalty and gradient clipping.
TRL's update is measured with several pass sizes, and with its smallest memory, answer by answer with gradient
checkpointing. Ours uses the default.

TRL runs in its own environment:

    python3 -m venv peer && peer/bin/pip install torch==2.13.0 transformers==5.19.0 trl==1.16.0
    python benchmarks/peers/compare_grpo.py --peer-python peer/bin/python --model recipes/smollm2/model
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from grpo_inputs import SUBJECTS, write_prompts
from turns import compare, option_parser, sides


def main() -> None:
    parser = option_parser(__doc__, [64, 16, 8, 4])
    parser.add_argument("--samples", type=int, default=8, help="answers per prompt")
    parser.add_argument("--new-tokens", type=int, default=24, help="maximum tokens per answer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_prompts(Path(folder))
        work = ["--model", str(options.model), "--inputs", folder]
        work += ["--samples", str(options.samples), "--new-tokens", str(options.new_tokens)]
        commands = sides(options, work, "run_rlhf_grpo.py", "run_trl_grpo.py")
        words = f"{len(SUBJECTS)} prompts x {options.samples} answers of at most {options.new_tokens} tokens"
        compare(options, commands, words)


if __name__ == "__main__":
    main()
