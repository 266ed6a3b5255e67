"""Inputs of both sides of `compare_dpo.py`: generated preference pairs, with answers of 40 to 120 tokens."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grpo_inputs import SUBJECTS

PAIRS_FILE = "pairs.jsonl"
IN_TURN_FILE = "in-turn.jsonl"
"""The same pairs in the order in which our run uses them, for a trainer that reads them in file order."""
ANSWER_TOKENS = (40, 120)
KINDS = ("dpo", "reward-model")
BETA, LEARNING_RATE = 0.1, 1e-5
TEXT = (
    "the old road that leads from our house to the river was built by people who had seen much more water than we "
    "have and every year in spring some of them come back with their children to look for what is left of it under "
    "grass stones and small white flowers while others stay at home because they know how long a day can be there"
)
"""Everyday English, one token per word. Answers consist of its words."""


def side_parser(description: str | None) -> argparse.ArgumentParser:
    """Options of both sides."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--kind", choices=KINDS, default="dpo")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--pairs", type=int, required=True, help="pairs per step")
    parser.add_argument("--iterations", type=int, required=True, help="measured steps, after one of warm-up")
    return parser


def make_pairs(count: int, seed: int = 0, *, prompt_words: int = 0) -> Iterator[Mapping[str, str]]:
    """Pairs with different prompts (questions in the chat format of SmolLM2) and two answers of different lengths.

    `prompt_words` words precede each question, of one token each.
    """
    chance = random.Random(seed)
    shortest, longest = ANSWER_TOKENS
    for number in range(count):
        question = f"Question {number}: what do you know about {chance.choice(SUBJECTS)}?"
        # The period of each sentence and the end-of-turn token of the answer are tokens, too.
        lengths = [chance.randint(shortest, longest) * 9 // 10 for _ in range(2)]
        chosen, rejected = (_answer(chance, length) for length in lengths)
        if prompt_words:
            question = f"{_answer(chance, prompt_words)} {question}"
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def write_pairs(folder: Path, pairs: Sequence[Mapping[str, str]], order: Sequence[int]) -> None:
    """Write both files. `order` contains the indices of `pairs` in training order."""
    lines = [json.dumps(pair) + "\n" for pair in pairs]
    (folder / PAIRS_FILE).write_text("".join(lines))
    (folder / IN_TURN_FILE).write_text("".join(lines[index] for index in order))


def _answer(chance: random.Random, words: int) -> str:
    """Sentences of 5 to 15 words."""
    sentences: list[str] = []
    while words > 0:
        length = min(words, chance.randint(5, 15))
        sentences.append(" ".join(chance.choices(TEXT.split(), k=length)).capitalize() + ".")
        words -= length
    return " ".join(sentences)
