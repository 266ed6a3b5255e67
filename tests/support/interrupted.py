"""Runs of an environment that end without a chance to write, and their journals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from playing import player

from rlhf_core.rollout.journal import Journal
from rlhf_core.types import Completion
from rlhf_episodes.contract import Outcome
from rlhf_episodes.journal.turn_journal import TurnJournal
from rlhf_testing.engine import FakeEngine
from rlhf_testing.episodes import plain
from rlhf_testing.samples import make_prompt


class Killed(BaseException):
    """Ends a run without giving it a chance to write."""


class Engine(FakeEngine):
    """Ends the run after `limit` turns, and notes those it sampled."""

    def __init__(self, limit: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.limit, self.sampled = limit, []

    def generate(self, requests: Any, sampling: Any) -> Iterator[Completion]:
        for request, completion in zip(reversed(requests), super().generate(requests, sampling), strict=True):
            if self.limit == len(self.sampled):
                raise Killed
            self.sampled.append((request.sample_id, request.branch, request.offset, completion.token_ids))
            yield completion


class Counts:
    """Ends after four turns. Its observations depend on all replies."""

    calls: list[str]

    def reset(self, task: Any) -> str:
        self.calls.append("reset")
        self.total = task.sample_id
        self.metrics = {"total": float(self.total)}
        self.turns = 0
        return f"{self.total}:"

    def step(self, reply: Any) -> tuple[str, float, bool]:
        self.calls.append("step")
        self.total += sum(reply.token_ids)
        self.turns += 1
        self.metrics = {"total": float(self.total)}
        return f"{self.total},", self.total / 7, self.turns == 4


class Keeps(Counts):
    """The same game with a state."""

    def state(self) -> dict[str, int]:
        return {"total": self.total, "turns": self.turns}

    def restore(self, task: Any, state: dict[str, int]) -> None:
        self.calls.append("restore")
        self.total, self.turns = state["total"], state["turns"]
        self.metrics = {"total": float(self.total)}


class Forks:
    """Plays two turns in each of two branches."""

    calls: list[str]

    async def run(self, task: Any, policy: Any) -> Outcome:
        self.calls.append("run")
        first = await policy.turn(f"{task.sample_id}:")
        other = policy.fork()
        second = await other.turn(f"{sum(first.token_ids)}a")
        third = await policy.turn(f"{sum(second.token_ids)}b")
        return Outcome(reward=0.1 * sum(third.token_ids), turn_rewards={1: 0.3}, metrics={"third": 1.0})


def made(kind: type) -> tuple[Callable[[], Any], list[str]]:
    """Environments of a kind, and the calls of all of them."""
    calls: list[str] = []
    return type(kind.__name__, (kind,), {"calls": calls}), calls


def journal(folder: Path, engine: Any, run: str = "run", num_kept: int = 1) -> tuple[Journal, TurnJournal]:
    lines = Journal(folder)
    return lines, TurnJournal(lines, engine, run, num_kept)


def attempt(kind: Any, folder: Path | None, engine: Engine, *, samples: int = 3, **options: Any) -> Any:
    """The episodes of an attempt of the run, by sample id. None if it was killed."""
    found = player(kind, engine=engine, max_new_tokens=3, **options)
    lines = None
    if folder is not None:
        lines, found.journal = journal(folder, engine)
    prompt = make_prompt(0)
    try:
        with closing(found):
            played = list(found.play([(prompt, number) for number in range(samples)]))
    except Killed:
        return None
    finally:
        if lines is not None:
            lines.close()
    return [plain(asdict(each)) for each in sorted(played, key=lambda each: each.sample_id)]


def same(found: Any) -> Any:
    """What a trainer sees: tokens reused by the engine are not part of it, nor is the class of a row."""
    for each in found:
        for row in each["rows"]:
            for name in ("tools", "conversation", "opening", "observed"):
                row.pop(name, None)
            row["sampled"] = {
                place: (number, {name: value for name, value in completion.items() if name != "num_reused"})
                for place, (number, completion) in row["sampled"].items()
            }
    return found
