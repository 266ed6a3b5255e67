"""Games of ten turns that end their process, or fail, in the middle of an episode."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar


class Ten:
    """Rewards digits. Each observation depends on all replies before it."""

    num_steps: ClassVar[int] = 0
    """Steps in this process."""

    def __init__(self, *, ends_at: str = "", after: int = 0, kills: bool = True) -> None:
        """ends_at: a file. The process that deletes it ends in its step number `after`, or the step raises."""
        self._ends_at, self._after, self._kills = ends_at, after, kills

    def reset(self, task: Any) -> str:
        self._total, self._turns = task.sample_seed % 100, 0
        return f"{self._total}>"

    def step(self, reply: Any) -> tuple[str, float, bool]:
        type(self).num_steps += 1
        if self._ends_at and type(self).num_steps >= self._after:
            self._end()
        digits = [int(char) for char in reply.text if char.isdigit()]
        self._total = (self._total + sum(digits)) % 100
        self._turns += 1
        return f"{self._total}>", len(digits) / 10, self._turns == 10

    def _end(self) -> None:
        try:
            process = Path(self._ends_at).read_text()
            Path(self._ends_at).unlink()
        except FileNotFoundError:
            return
        if process:  # another one, on which this one depends
            os.kill(int(process), signal.SIGKILL)
            time.sleep(600)
        if self._kills:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("ended by the test")


class Remembers(Ten):
    """With a state."""

    def state(self) -> list[int]:
        return [self._total, self._turns]

    def restore(self, task: Any, state: list[int]) -> None:
        self._total, self._turns = state
