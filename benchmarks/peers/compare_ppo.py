"""Speed and peak memory of a PPO iteration with a real model: this project compared with TRL, in turn.

`compare.py` does the same with generated models. Here policy, reference and critic come from a model folder, and the
reward is a tiny model with the same tokens and random weights, the same files on both sides. Both sample one answer to
each prompt (or `--samples`) at temperature 1 until it ends, run reference and critic, and make one AdamW step of all
weights of policy and critic in float32, without gradient clipping. TRL's update is measured with several pass sizes,
and with its smallest memory, with gradient checkpointing. Ours uses the default.

TRL runs in its own environment:

    python3 -m venv peer && peer/bin/pip install torch==2.13.0 transformers==5.19.0 trl==1.12.0
    python benchmarks/peers/compare_ppo.py --peer-python peer/bin/python --model recipes/smollm2/model
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from inputs import write_real_inputs
from turns import compare, option_parser, sides


def main() -> None:
    parser = option_parser(__doc__, [8, 4, 2])
    parser.add_argument("--prompts", type=int, default=8, help="prompts per iteration")
    parser.add_argument("--samples", type=int, default=1, help="answers per prompt")
    parser.add_argument("--new-tokens", type=int, default=24, help="maximum tokens per answer")
    parser.add_argument("--prompt-words", type=int, default=0, help="words before each request, about a token each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_real_inputs(Path(folder), options.model, num_prompts=options.prompts, prompt_words=options.prompt_words)
        work = ["--inputs", folder, "--prompts", str(options.prompts), "--new-tokens", str(options.new_tokens)]
        work += ["--samples", str(options.samples)]
        commands = sides(options, work, "run_rlhf.py", "run_trl.py")
        words = f"{options.prompts} prompts x {options.samples} answers of at most {options.new_tokens} tokens"
        compare(options, commands, words)


if __name__ == "__main__":
    main()
