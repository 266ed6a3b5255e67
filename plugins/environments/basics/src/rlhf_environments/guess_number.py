"""`guess-number`: find a number by being told whether it is higher or lower.

What is said fits an alphabet of ten digits, `>` and `,`. The game begins with `>,`; a guess is a number in digits; the
answer is `>` where the number is higher than the guess and `,` where it is lower. Anything else than a number of the
game is answered with `>,` again and costs the turn.
"""

from __future__ import annotations

from random import Random
from typing import Any

from .config import GuessNumberConfig

OPENING, HIGHER, LOWER = ">,", ">", ","


class GuessNumber:
    """One game. The number is the prompt's answer, or where it has none its position modulo `numbers`.

    So each number comes equally often, and the samples of one prompt look for the same one.
    """

    def __init__(self, *, numbers: int = 10, shuffle_observations: bool = False) -> None:
        self._numbers = numbers
        self._shuffles = shuffle_observations

    def reset(self, task: Any) -> str | None:
        """The opening; None where the prompt itself is one. Raises `ValueError` on an answer outside of the game."""
        self._number = self._hidden(task)
        self._random = Random(task.sample_seed)
        return None if task.prompt.text else OPENING

    def step(self, reply: Any) -> tuple[str | None, float, bool]:
        """Answer a guess; the right one is rewarded with 1 and ends the episode."""
        guess = self._read(reply.text)
        if guess is None:
            return OPENING, 0.0, False
        if guess == self._number:
            return None, 1.0, True
        if self._shuffles:
            return self._random.choice((HIGHER, LOWER)), 0.0, False
        return direction(guess, self._number), 0.0, False

    def _hidden(self, task: Any) -> int:
        answer = task.prompt.answer
        if answer is None:
            return int(task.prompt.position) % self._numbers
        number = self._read(str(answer))
        if number is None:
            raise ValueError(
                f"the answer of prompt {task.prompt.position} is {answer!r:.40}, not a number from 0 to "
                f"{self._numbers - 1}: correct it, or raise environment.numbers"
            )
        return number

    def _read(self, text: str) -> int | None:
        """A number of the game; None for anything else."""
        text = text.strip()
        # No more digits than the largest has: a model may write thousands, and int() refuses those.
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(self._numbers - 1))):
            return None
        number = int(text)
        return number if number < self._numbers else None


def direction(guess: int, number: int) -> str:
    """Where `number` lies, seen from a wrong guess."""
    return HIGHER if number > guess else LOWER


def build(config: GuessNumberConfig, context: object) -> GuessNumber:
    """A game for one episode."""
    return GuessNumber(numbers=config.numbers, shuffle_observations=config.shuffle_observations)
