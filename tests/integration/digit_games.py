"""Environments that any policy scores something in, so that runs compare more than rounding."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from rlhf_episodes.contract import Outcome


class CountDigits:
    """Each turn is rewarded for its digits, most for the task's own; ends after a number of turns from the seed."""

    def __init__(self, *, dies_at: str = ""):
        """dies_at: a file; the process that takes it away, in the middle of an episode, is killed."""
        self._dies_at = dies_at

    def reset(self, task: Any) -> str:
        self._digit = str(task.seed % 10)
        self._turns = 2 + task.sample_seed % 2
        self._played = 0
        return f"{task.seed % 100:02d}>"

    def step(self, reply: Any) -> tuple[str, float, bool]:
        self._played += 1
        if self._dies_at and self._played == 2:
            self._die()
        digits = [char for char in reply.text if char.isdigit()]
        reward = sum(digit == self._digit for digit in digits) + len(digits) / 10
        return f">{self._played}", reward, self._played == self._turns

    def _die(self) -> None:
        try:
            Path(self._dies_at).unlink()
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class Branches:
    """One turn, then some branches that go on from it, with a reward of each and one for the whole."""

    async def run(self, task: Any, policy: Any) -> Any:
        first = await policy.turn(f"{task.seed % 100:02d}>")
        rewards = {first.turn: len(first.text) / 10}
        for number in range(1 + task.sample_seed % 2):
            branch = policy.fork()
            for _ in range(2):
                reply = await branch.turn(f">{number}")
                rewards[reply.turn] = sum(char.isdigit() for char in reply.text) / 5
        return Outcome(reward=0.5 * (task.sample_seed % 3), turn_rewards=rewards, metrics={"branches": number + 1})
