"""The prompt source `guess-number`: games to play, some with past guesses, each with a random next guess."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from rlhf_core.components import TaskContext
from rlhf_core.protocols import PromptSource
from rlhf_core.util import derive_seed

from .config import GuessesConfig
from .guess_number import OPENING, direction


class Guesses:
    """Games in which game i has the hidden number i modulo `numbers`. Its `completion` is a uniformly random guess.

    Training on completions teaches the format of a guess and all numbers, from which reinforcement learning can find
    out how to use the hints.
    """

    def __init__(self, config: GuessesConfig) -> None:
        self._config = config
        self._size = config.numbers if config.size is None else config.size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < self._size:
            raise IndexError(index)
        config = self._config
        random = Random(derive_seed(config.problem_seed, "guess-number", index))
        number = index % config.numbers
        prompt = OPENING
        for _ in range(random.randint(0, config.max_past_guesses)):
            # Exclude the hidden number, which would end the game.
            wrong = (number + random.randrange(1, config.numbers)) % config.numbers
            prompt += f"{wrong}{config.end_of_turn}{direction(wrong, number)}"
        return {"prompt": prompt, "answer": number, "completion": str(random.randrange(config.numbers))}

    def describe(self, index: int) -> str:
        return f"guess-number game {index}"


def build(config: GuessesConfig, context: TaskContext) -> PromptSource:
    """Build the source of a `prompts` section."""
    return Guesses(config)
