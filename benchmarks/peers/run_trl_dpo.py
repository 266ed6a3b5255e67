"""The other side of `compare_dpo.py`: TRL's trainers on the same pairs. Runs in its own environment."""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from typing import Any

from dpo_inputs import BETA, IN_TURN_FILE, LEARNING_RATE, side_parser
from run_trl import measure


def build_trainer(options: argparse.Namespace, output: str) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

    common: dict[str, Any] = {
        "output_dir": output,
        "per_device_train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": options.pairs // options.micro_batch,
        "max_steps": options.iterations + 1,
        "train_sampling_strategy": "sequential",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "bf16": False,
        "gradient_checkpointing": options.gradient_checkpointing,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }
    lines = (options.inputs / IN_TURN_FILE).read_text().splitlines()
    data = Dataset.from_list([json.loads(line) for line in lines])
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if options.kind == "reward-model":
        scorer = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=1, dtype=torch.float32)
        scorer.score.weight.data.zero_()  # the same initial value as ours
        # The score is read at the last token that is not padding, so the padding token must differ from the last token.
        config = RewardConfig(pad_token=tokenizer.unk_token, **common)
        return RewardTrainer(model=scorer, args=config, train_dataset=data, processing_class=tokenizer)
    load = AutoModelForCausalLM.from_pretrained
    return DPOTrainer(
        model=load(options.model, dtype=torch.float32),
        ref_model=load(options.model, dtype=torch.float32),
        args=DPOConfig(beta=BETA, **common),
        train_dataset=data,
        processing_class=tokenizer,
    )


def tokens_of_steps(trainer: Any, pairs: int, steps: int) -> list[int]:
    """Tokens of each step's rows: each answer with its prompt."""
    columns = ("prompt_ids", "prompt_ids", "chosen_ids", "rejected_ids")
    counts = [sum(len(row.get(name) or ()) for name in columns) for row in trainer.train_dataset]
    return [sum(counts[step * pairs : (step + 1) * pairs]) for step in range(steps)]


def main() -> None:
    parser = side_parser(__doc__)
    parser.add_argument("--micro-batch", type=int, required=True, help="pairs per pass of the update")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(options, folder)
        tokens = tokens_of_steps(trainer, options.pairs, options.iterations + 1)
        seconds, peak = measure(trainer, "cpu")
    logged = [line for line in trainer.state.log_history if "loss" in line]
    margin = "rewards/margins" if options.kind == "dpo" else "margin"
    losses, margins = ([float(line[key]) for line in logged] for key in ("loss", margin))
    result = {"seconds": seconds[1:], "tokens": tokens[1:], "peak_bytes": peak, "losses": losses, "margins": margins}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
