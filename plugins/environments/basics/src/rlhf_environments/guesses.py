"""The prompt source `guess-number`: the games to play, or games in progress with a next guess made at random."""

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
    """Game i looks for the number i modulo `numbers`. Its `completion` is a guess that knows nothing.

    It has the right form and, drawn evenly, every number in it: a start from which reinforcement learning can find
    out what the answers are good for.
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
            # Any number but the one looked for: the game would be over.
            wrong = (number + random.randrange(1, config.numbers)) % config.numbers
            prompt += f"{wrong}{config.end_of_turn}{direction(wrong, number)}"
        return {"prompt": prompt, "answer": number, "completion": str(random.randrange(config.numbers))}

    def describe(self, index: int) -> str:
        return f"guess-number game {index}"


def build(config: GuessesConfig, context: TaskContext) -> PromptSource:
    """The source of a `prompts` section."""
    return Guesses(config)
