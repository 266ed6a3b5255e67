"""Speed and peak memory of a PPO iteration on a real model: this project against TRL, in processes that take turns.

`compare.py` does the same on models made in code. Here policy, reference and critic are of a model folder, and the
reward is a tiny model of its tokens with random weights, the same files on both sides. Both sample an answer to each
of the prompts at temperature 1 until it ends, run reference and critic, and make one AdamW step of all weights of
policy and critic in float32, without clipping of gradients. TRL's update is measured in passes of several sizes, and
in the leanest way, with gradient checkpointing; ours at its own default.

TRL runs in an environment of its own:

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
    parser.add_argument("--prompts", type=int, default=8, help="of an iteration, with an answer to each")
    parser.add_argument("--new-tokens", type=int, default=24, help="of an answer, at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_real_inputs(Path(folder), options.model, num_prompts=options.prompts)
        work = ["--inputs", folder, "--prompts", str(options.prompts), "--new-tokens", str(options.new_tokens)]
        commands = sides(options, work, "run_rlhf.py", "run_trl.py")
        compare(options, commands, f"{options.prompts} prompts, answers of at most {options.new_tokens} tokens")


if __name__ == "__main__":
    main()
