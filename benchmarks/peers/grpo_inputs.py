"""What both sides of `compare_grpo.py` are given: prompts as chat messages, and a reward that needs no model.

The prompts ask for long answers, so that nearly all of them take every token they may and both sides do the same work.
"""

from __future__ import annotations

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
"""Of different lengths, in no order."""


def write_prompts(folder: Path) -> None:
    """`prompts.jsonl`, as both sides read it."""
    asked = [[{"role": "user", "content": f"Write a long story about {each}."}] for each in SUBJECTS]
    (folder / PROMPTS_FILE).write_text("".join(json.dumps({"prompt": each}) + "\n" for each in asked))


def share_of_vowels(text: str) -> float:
    """The reward: how many of the characters are vowels; hardly two answers have the same."""
    return sum(text.lower().count(vowel) for vowel in "aeiou") / max(1, len(text))


def vowels(rollouts: Sequence[Any]) -> list[float]:
    """The reward as a run file names it."""
    return [share_of_vowels(rollout.completion) for rollout in rollouts]
