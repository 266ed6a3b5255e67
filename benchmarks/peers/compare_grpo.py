"""Speed and peak memory of a GRPO iteration with a real model: this project compared with TRL, in turn.

Both start from the same model folder and the same prompts, sample the same number of answers to each at temperature 1,
score them with the same Python function, and make one AdamW step of all weights, without KL penalty and gradient
clipping. Weights are float32, and with `--precision bf16` the arithmetic is bfloat16 (TRL: `bf16=True`).
TRL's update is measured with several pass sizes, and with its smallest memory, answer by answer with gradient
checkpointing. Ours uses the default.

TRL runs in its own environment:

    python3 -m venv peer && peer/bin/pip install torch==2.13.0 transformers==5.19.0 trl==1.16.0
    python benchmarks/peers/compare_grpo.py --peer-python peer/bin/python --model recipes/smollm2/model
    python benchmarks/peers/compare_grpo.py --peer-python peer/bin/python --made 0.5B --device cuda --precision bf16

With `--made` the model is random, and its answers have the maximum length.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from grpo_inputs import SUBJECTS, add_device_options, write_prompts
from inputs import SIZES, write_chat_model
from turns import compare, option_parser, sides


def main() -> None:
    parser = option_parser(__doc__, [64, 16, 8, 4], needs_model=False)
    parser.add_argument("--prompts", type=int, default=len(SUBJECTS), help="prompts per iteration")
    parser.add_argument("--prompt-tokens", type=int, help="length of the prompts, by default 15 to 30 tokens of text")
    parser.add_argument("--samples", type=int, default=8, help="answers per prompt")
    parser.add_argument("--new-tokens", type=int, default=24, help="maximum tokens per answer")
    parser.add_argument("--made", choices=list(SIZES), help="size of a model made in code, instead of --model")
    add_device_options(parser)
    options = parser.parse_args()
    if (options.model is None) == (options.made is None):
        parser.error("give either --model or --made")
    with tempfile.TemporaryDirectory() as folder:
        if options.made:
            options.model = Path(folder) / f"made-{options.made}"
            write_chat_model(options.model, options.made)
        write_prompts(Path(folder), options.model, number=options.prompts, tokens=options.prompt_tokens)
        work = ["--model", str(options.model), "--inputs", folder]
        work += ["--samples", str(options.samples), "--new-tokens", str(options.new_tokens)]
        work += ["--device", options.device, "--precision", options.precision]
        commands = sides(options, work, "run_rlhf_grpo.py", "run_trl_grpo.py")
        length = f" of {options.prompt_tokens} tokens" if options.prompt_tokens else ""
        words = f"{options.prompts} prompts{length} x {options.samples} answers of at most {options.new_tokens} tokens"
        compare(options, commands, words)


if __name__ == "__main__":
    main()
