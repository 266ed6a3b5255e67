"""Answers of saved folders with plain transformers, without imports from this project.

    .venv/bin/python recipes/answer.py runs/grpo-sums runs/dpo-sums

Loads `model/` of each run folder, or else `adapter/` with peft and the base model that it names (call the script in the
folder in which the run was started). Any other model folder works, too. The answers are greedy.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

QUESTIONS = tuple(
    f"State the final answer to the following arithmetic problem: {sum_} =" for sum_ in ("5 - 2", "3 + 4", "9 - 1")
)
NEW_TOKENS = 16


def folder_of(run: Path) -> Path | None:
    """Return the folder to load: that of a run, or a model folder itself. None if there is none."""
    found = (run / "model" / "config.json", run / "adapter" / "adapter_config.json", run / "config.json")
    return next((path.parent for path in found if path.is_file()), None)


def answers(folder: Path) -> list[str]:
    """Return greedy answers of the model in `folder` to `QUESTIONS`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter = folder / "adapter_config.json"
    base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"] if adapter.is_file() else folder
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    said = []
    for question in QUESTIONS:
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": question}]
            question = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = torch.tensor([tokenizer(question, add_special_tokens=False)["input_ids"]])
        written = model.generate(
            ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        said.append(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))
    return said


def main() -> None:
    """Print questions and answers. Exit code 2 if a folder does not contain a model."""
    parser = argparse.ArgumentParser(description="Print answers of saved folders with plain transformers.")
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="a run folder, or a model folder")
    for run in parser.parse_args().folders:
        folder = folder_of(run)
        if folder is None:
            print(f"answer.py: {run} holds no model/ and no adapter/: name a run that is done", file=sys.stderr)
            sys.exit(2)
        for question, answer in zip(QUESTIONS, answers(folder), strict=True):
            print(f"{folder}: {question} {answer!r}")


if __name__ == "__main__":
    main()
