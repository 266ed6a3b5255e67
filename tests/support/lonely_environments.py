"""Environments of every form, correct and faulty, in a file that another process can run."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import re
import stat
import sys
import time

from rlhf_episodes import EpisodeTruncated, Outcome


class Counts:
    """Three turns. The reward of each is its number plus a tenth of the last digit of the task's seed."""

    def __init__(self, *, turns: int = 3):
        self.turns = turns

    def reset(self, task):
        self.task = task
        return f"{task.seed % 7},{task.prompt.metadata.get('name', '')}"

    def step(self, reply):
        last = reply.turn + 1 == self.turns
        return f">{len(reply.text)}", reply.turn + self.task.seed % 10 / 10, last


class CountsAsync(Counts):
    """The same with coroutines."""

    async def reset(self, task):
        await asyncio.sleep(0)
        return Counts.reset(self, task)

    async def step(self, reply):
        return Counts.step(self, reply)


class Sums:
    """Methods as tools."""

    def reset(self, answer=None, prompt=None):
        self.results = [answer, prompt]
        return "add"

    def add(self, first: int, second: int) -> str:
        """Add two numbers."""
        self.results.append(first + second)
        return str(first + second)

    def get_reward(self) -> float:
        return float(len(self.results))


class Forks:
    """Two branches at a time in `run(task, policy)`, with all visible limits as metrics."""

    async def run(self, task, policy):
        try:
            policy.fork()
        except ValueError as error:
            refused = len(str(error))
        left = [policy.remaining_turns, policy.remaining_tokens]
        first = await policy.turn("1" if task.prompt.text else None, stop=("7",))
        left += [policy.remaining_turns, policy.remaining_tokens]
        other = policy.fork()
        second, third = await asyncio.gather(policy.turn("2"), other.turn("3"))
        grown = other.fork()
        rewards = {first.turn: 0.5, second.turn: 1.0, third.turn: 2.0}
        try:
            while True:
                reply = await grown.turn("4")
                rewards[reply.turn] = 0.25
                left += [grown.remaining_turns, grown.remaining_tokens]
        except EpisodeTruncated as ended:
            refused += len(str(ended))
        left += [policy.remaining_tokens, other.remaining_tokens, grown.remaining_tokens]
        metrics = {f"left_{place}": number for place, number in enumerate(left)}
        return Outcome(reward=-1.0, turn_rewards=rewards, metrics={**metrics, "refused": refused}, status="truncated")


class GivesUp:
    """Stops waiting for a branch, whose turn is then not sampled."""

    async def run(self, task, policy):
        await policy.turn()
        branch = asyncio.ensure_future(policy.fork().turn("1"))
        await asyncio.sleep(0)
        branch.cancel()
        reply = await policy.turn("2")
        return Outcome(turn_rewards={reply.turn: 1.0})


class Faulty:
    """Causes the fault named by a prompt's answer in one method. Without a fault the episode ends normally."""

    def __init__(self, *, where: str = "step", flag: str = ""):
        self.where = where
        self.flag = flag
        if where == "its constructor":
            self._fault("raise")

    def reset(self, task):
        self.task = task
        self.number = task.sample_id
        if self.where == "reset":
            self._do()
        return "0"

    def step(self, reply):
        if reply.turn == 0:
            return "1", 0.0, False
        if self.where == "step":
            found = self._do()
            if found is not None:
                return found
        return "2", 1.0, True

    def _do(self):
        """Cause the fault for sample 1 only: every time, or once if `flag` names a file."""
        if self.number != 1:
            return None
        if self.flag:
            if os.path.exists(self.flag):
                return None
            with open(self.flag, "w"):
                pass
        return self._fault(self.task.prompt.answer)

    def _fault(self, fault):
        if fault == "raise":
            raise OSError("no\x1bluck")
        if fault == "exit":
            sys.exit(3)
        if fault == "nan":
            return "2", float("nan"), True
        if fault == "no triple":
            return "2"
        if fault == "no text":
            return object(), 1.0, False
        if fault == "half a character":
            return "\ud800", 1.0, False
        if fault == "os._exit":
            os._exit(7)
        if fault == "segfault":
            ctypes.string_at(0)
        if fault == "lock":
            re.match("(a|aa)+$", "a" * 100 + "b")  # takes years, holding Python's lock
        if fault == "sleep":
            time.sleep(600)
        if fault == "memory":
            kept = []
            while True:
                kept.append(bytearray(b"x" * 20_000_000))
                time.sleep(0.005)
        if fault == "print":
            while True:
                print("x" * 1_000_000)
        if fault == "scribble":
            _scribble()
            time.sleep(600)
        return None


class FaultyInLoop(Faulty):
    """The same in a coroutine, which blocks all others."""

    async def step(self, reply):
        return Faulty.step(self, reply)


class Wanders:
    """Sample 0 holds Python's lock while others sleep in `step`, so that all are running when their process hangs."""

    def reset(self, task):
        self.task = task
        return "0"

    def step(self, reply):
        time.sleep(0.1)  # until the others sleep
        if self.task.sample_id == 0:
            re.match("(a|aa)+$", "a" * 100 + "b")
        time.sleep(0.2)
        return None, 1.0, True


class SaysWho:
    """The reward is the id of its process."""

    def reset(self, task):
        return "0"

    def step(self, reply):
        return None, float(os.getpid()), True


class Imports:
    """The reward is the number of heavy libraries that are loaded."""

    def reset(self, task):
        return "0"

    def step(self, reply):
        return None, float(len({"torch", "transformers", "numpy"} & set(sys.modules))), True


def _scribble():
    """Write an invalid message to the connection of this process."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, b"\xff\xff\xff\xff nothing that can be read")
        except OSError:
            continue


class Storm:
    """Five turns with a rare fault of one of four kinds at a random turn, or only an error if `calm`."""

    def __init__(self, *, calm: bool = False):
        self.calm = calm

    def reset(self, task):
        self.random = random.Random(task.sample_seed)
        return str(self.random.randrange(10))

    def step(self, reply):
        drawn = self.random.random()
        if self.calm and drawn < 0.06:
            raise OSError("no luck")
        if drawn < 0.02:
            os._exit(7)
        if drawn < 0.03:
            re.match("(a|aa)+$", "a" * 100 + "b")
        if drawn < 0.04:
            time.sleep(600)
        if drawn < 0.06:
            raise OSError("no luck")
        time.sleep(self.random.choice([0, 0, 0.01, 0.05]))
        return str(reply.turn), self.random.random(), reply.turn == 4
