"""Inputs of both sides of `compare_grpo.py`: prompts as chat messages, and a reward without a model.

The prompts request long answers, so that nearly all answers have the maximum length and both sides do the same work.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPTS_FILE = "prompts.jsonl"
SUBJECTS = (
    "a lighthouse",
    "how bread is made, from the field to the table",
    "two brothers who cross a desert with one camel and a map that is wrong",
    "rain",
    "the first railway of your country and the people who built it",
    "an old clock that runs backwards whenever nobody is in the room to see it do so",
    "whales",
    "a letter that arrives forty years late, and what its reader does on the day after",
)
"""Subjects of different lengths, in random order."""
NOTES = (
    "use short words and tell us first who was there and then what each of them said and why it was so cold that day"
)
"""Words of `notes`."""


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of both sides for where and in which precision they compute."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")


def notes(count: int) -> list[str]:
    """Words that lengthen a prompt, of one token each."""
    return list(itertools.islice(itertools.cycle(NOTES.split()), max(0, count)))


def write_prompts(folder: Path, model: Path, *, number: int, tokens: int | None) -> None:
    """Write `prompts.jsonl`, which both sides read: `number` prompts, each of about `tokens` tokens if given."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = []
    for subject in itertools.islice(itertools.cycle(SUBJECTS), number):
        messages = [{"role": "user", "content": f"Write a long story about {subject}."}]
        if tokens is not None:
            messages.insert(0, {"role": "system", "content": "You write for a newspaper."})
            missing = tokens - len(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
            messages[0]["content"] = " ".join([messages[0]["content"], *notes(missing)])
        lines.append(json.dumps({"prompt": messages}) + "\n")
    (folder / PROMPTS_FILE).write_text("".join(lines))


def count_prompts(folder: Path) -> int:
    """Number of prompts in the file."""
    return len((folder / PROMPTS_FILE).read_text().splitlines())


def share_of_vowels(text: str) -> float:
    """Reward: the share of characters that are vowels or odd digits, which differs for almost all answers.

    Models made in code answer with words that are numbers.
    """
    return sum(text.lower().count(one) for one in "aeiou13579") / max(1, len(text))


def vowels(rollouts: Sequence[Any]) -> list[float]:
    """The same reward in the form used by a run file."""
    return [share_of_vowels(rollout.completion) for rollout in rollouts]
