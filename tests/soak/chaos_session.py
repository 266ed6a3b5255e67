"""One session of a run that faults strike: how it is started, the moments of it, and what must hold at its end."""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from chaos_placement import STEPS, Placement, environment
from running import Forked, command_line, marked, rlhf

PATIENCE_SECONDS = 120.0
"""For anything a session does, over the time it takes when idle; five times what the slowest took on a busy machine."""
_LOOK_SECONDS = 0.001
KILLED = -9


class Wrong(AssertionError):
    """What was promised does not hold."""


def wait(done: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS, every: float = _LOOK_SECONDS) -> Any:
    """What `done` says, once it is true. Time in which this process itself was stopped does not count."""
    spent = 0.0
    while not (said := done()):
        if spent > seconds:
            raise Wrong(f"waited {seconds:g} s for {what}")
        before = time.monotonic()
        time.sleep(every)
        spent += min(time.monotonic() - before, every + 0.05)
    return said


def count_lines(path: Path) -> int:
    """Whole lines; 0 where there is no file."""
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def steps_saved(folder: Path) -> list[int]:
    """Steps of the checkpoints, oldest first."""
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*") if path.is_dir())


def summary_of(folder: Path) -> dict[str, Any]:
    """{} where there is none, status `broken` where it is damaged."""
    try:
        said = json.loads((folder / "summary.json").read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        return {"status": "broken"}
    return said if isinstance(said, dict) else {"status": "broken"}


class Session:
    """`rlhf train` in a folder, from its start to its end."""

    def __init__(self, root: Path, folder: Path, placement: Placement, *flags: str) -> None:
        """`root`: holds the run file, the reward and temporary files; every process of the session works there."""
        self._root = root
        self.folder = folder
        self.before = summary_of(folder)
        self._first = (steps_saved(folder) or [0])[-1]
        self._calls = self._called()
        self._placement = placement
        self.error = ""
        """What it said on stderr, once it has ended."""
        self._ended: tuple[int, str] | None = None
        arguments = ("train", *flags, "--output", str(folder), "--quiet", *placement.flags)
        self.process: Forked = rlhf(*arguments, env=environment(root), cwd=root, **placement.options)

    @property
    def is_over(self) -> bool:
        return self.process.returncode is not None

    def wait_for(self, done: Callable[[], Any], what: str) -> bool:
        """False where it was over before."""
        return bool(wait(lambda: "over" if self.is_over else done(), what)) and not self.is_over

    def has_begun(self) -> bool:
        """Whether the summary is its own."""
        return summary_of(self.folder).get("pid") == self.process.pid

    def owns_the_folder(self) -> bool:
        try:
            return (self.folder / ".lock").read_text() == str(self.process.pid)
        except FileNotFoundError:
            return False

    def reach(self, chance: random.Random, *, from_start: bool) -> str | None:
        """Wait for a moment of the session; which it was, None where it was over before. `from_start`: or right away.

        What comes within a step or a write is drawn as a time after it has begun.
        """
        kinds = ["step"] * 6 + ["checkpoint"] * 2 + ["saved", "reward", "reward", "last step"]
        kind = chance.choice([*kinds, "start", "owned"] if from_start else kinds)
        late = chance.random() * {"start": 0.6, "owned": 0.3, "checkpoint": 0.02, "last step": 0.3}.get(kind, 0.05)
        late *= 10 if self._placement.name == "ray" and kind == "start" else 1
        lines = self.folder / "metrics.jsonl"
        step = min(STEPS, self._first + chance.randint(1, 5))
        calls = chance.randint(1, 4)
        done: Callable[[], Any] = {
            "start": lambda: True,
            "owned": self.owns_the_folder,
            "step": lambda: self.has_begun() and count_lines(lines) >= step,
            "last step": lambda: self.has_begun() and count_lines(lines) >= STEPS - 1,
            "checkpoint": lambda: any(self.folder.glob("checkpoints/.partial-step-*")),
            "saved": lambda: (steps_saved(self.folder) or [0])[-1] > self._first,
            "reward": lambda: self.has_begun() and self._called() >= self._calls + calls,
        }[kind]
        if not self.wait_for(done, f"the moment: {kind}"):
            return None
        time.sleep(late)
        return None if self.is_over else f"{kind} {step if kind == 'step' else ''} + {late * 1000:.0f} ms"

    def _called(self) -> int:
        try:
            return (self._root / "calls").stat().st_size
        except FileNotFoundError:
            return 0

    def processes(self) -> list[psutil.Process]:
        """All that it started and that runs: by their mark, or, if forked, by the folder they work in."""
        found = {each.pid: each for each in marked(self.process.mark)}
        for each in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if each.pid != os.getpid() and each.cwd() == str(self._root) and each.status() != "zombie":
                    found[each.pid] = each
        return [each for each in found.values() if each.pid != self.process.pid]

    def named(self, what: str) -> list[psutil.Process]:
        """Those of its processes whose command line has this."""
        return [each for each in self.processes() if what in " ".join(_command_line(each))]

    def end(self, *allowed: tuple[int, str]) -> tuple[int, str]:
        """Wait for its end: exit code and status of the summary, which are among these and belong together.

        The status `before` stands for a summary that it has not touched. Can be called again.
        """
        ended = self._ended or self._end(f"the end of the session, which should be one of {allowed}")
        if ended not in allowed:
            raise Wrong(f"ended with {ended[0]}, summary {ended[1]}; allowed are {allowed}\n{self.error[-3000:]}")
        if "Traceback" in self.error:
            raise Wrong(f"a traceback: {self.error[-3000:]}")
        if ended[0] in (1, 2) and len(re.findall("^error: ", self.error, re.MULTILINE)) != 1:
            raise Wrong(f"ended with {ended[0]}, which one error tells: {self.error[-3000:]}")
        return ended

    def _end(self, what: str) -> tuple[int, str]:
        wait(lambda: self.is_over, what, every=0.005)
        assert self.process.returncode is not None
        self.error = "\n".join(self.process.output())
        said = summary_of(self.folder)
        status = "before" if said == self.before else str(said.get("status"))
        wait(lambda: not self.processes(), f"the end of all that it started: {self._left()}", every=0.01)
        self.process.end()
        self._ended = self.process.returncode, status
        return self._ended

    def _left(self) -> str:
        return str([command_line(each) for each in self.processes()])

    def kill(self) -> None:
        """kill -9 of all of it, checked by nobody."""
        for each in self.processes():
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.end()


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
