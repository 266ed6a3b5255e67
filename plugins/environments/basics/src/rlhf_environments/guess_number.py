"""`guess-number`: find a hidden number with hints of whether it is higher or lower.

The game's text uses only digits, `>` and `,`. It starts with `>,`. A guess is a number in digits. The hint is `>` if
the hidden number is higher than the guess, and `,` if it is lower. The hint for an invalid guess is `>,`, and the turn
counts.
"""

from __future__ import annotations

from random import Random
from typing import Any

from .config import GuessNumberConfig

OPENING, HIGHER, LOWER = ">,", ">", ","


class GuessNumber:
    """One game. The hidden number is the prompt's answer, or else the prompt's position modulo `numbers`.

    So each number occurs equally often, and all samples of a prompt have the same number.

    Example:
        >>> from types import SimpleNamespace as Record
        >>> game = GuessNumber()
        >>> game.reset(Record(prompt=Record(text="", answer="7", position=0), sample_seed=0))
        '>,'
        >>> game.step(Record(text="5")), game.step(Record(text="7"))
        (('>', 0.0, False), (None, 1.0, True))
    """

    def __init__(self, *, numbers: int = 10, shuffle_observations: bool = False) -> None:
        self._numbers = numbers
        self._shuffles = shuffle_observations

    def reset(self, task: Any) -> str | None:
        """Return the opening, or None if the prompt has text. Raises `ValueError` if its answer is not a number."""
        self._number = self._hidden_number(task)
        self._random = Random(task.sample_seed)
        self._num_drawn = 0
        return None if task.prompt.text else OPENING

    def step(self, reply: Any) -> tuple[str | None, float, bool]:
        """Return a hint. The right guess gets the reward 1 and ends the episode."""
        guess = self._parse(reply.text)
        if guess is None:
            return OPENING, 0.0, False
        if guess == self._number:
            return None, 1.0, True
        if self._shuffles:
            self._num_drawn += 1
            return self._random.choice((HIGHER, LOWER)), 0.0, False
        return direction(guess, self._number), 0.0, False

    def state(self) -> int:
        """Return the number of random hints so far. The rest of the game follows from its task."""
        return self._num_drawn

    def restore(self, task: Any, state: int) -> None:
        """Continue a game after the steps that led to `state`."""
        self.reset(task)
        for _ in range(state):
            self._random.choice((HIGHER, LOWER))
        self._num_drawn = state

    def _hidden_number(self, task: Any) -> int:
        answer = task.prompt.answer
        if answer is None:
            return int(task.prompt.position) % self._numbers
        number = self._parse(str(answer))
        if number is None:
            raise ValueError(
                f"the answer of prompt {task.prompt.position} is {answer!r:.40}, not a number from 0 to "
                f"{self._numbers - 1}: correct it, or increase environment.numbers"
            )
        return number

    def _parse(self, text: str) -> int | None:
        """Parse a number of the game. Return None for any other text."""
        text = text.strip()
        # Limit the number of digits: a model may write thousands, which int() rejects.
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(self._numbers - 1))):
            return None
        number = int(text)
        return number if number < self._numbers else None


def direction(guess: int, number: int) -> str:
    """Return the hint for a wrong guess.

    Example:
        >>> direction(5, number=7)
        '>'
    """
    return HIGHER if number > guess else LOWER


def build(config: GuessNumberConfig, context: object) -> GuessNumber:
    """Build the environment of one episode."""
    return GuessNumber(numbers=config.numbers, shuffle_observations=config.shuffle_observations)
