"""A run folder that is struck again and again: each session after a fault is the resume that has to mend it."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from chaos_disk import SmallDisk, small_disk
from chaos_folder import Untouched, check_begun, check_done, check_shared_memory, shared_memory
from chaos_placement import TRAPS, Placement, write_run
from chaos_session import Session, Wrong, steps_saved

from rlhf_core.runfolder.checkpoints import find_damage

Outcome = Literal["equal", "promised", "failed"]

DONE = (0, "done")
FAILED = (1, "failed")
STOPPED = ((130, "interrupted"), (130, "before"), DONE)
KILLED = ((-9, "running"), (-9, "before"), (-9, "done"))
_MOST = {"local": 12, "ranks": 8, "ray": 5}
"""Faults of one folder."""
_ISOLATED = 0.35
_ON_A_DISK = 0.5
_IN_BACKGROUND = 0.5
"""Shares of the folders whose reward has processes of its own, that lie on a small disk, and whose checkpoints are
written in the background."""


class Missed(Exception):
    """The session was over before the fault could strike; nothing is counted."""


@dataclass(slots=True)
class Struck:
    """A fault that struck."""

    fault: str
    moment: str
    outcome: Outcome | None = None
    detail: str = ""


class Chain:
    """One folder, its sessions, and what struck them."""

    def __init__(
        self,
        root: Path,
        placement: Placement,
        untouched: Untouched,
        chance: random.Random,
        disk: SmallDisk | None,
    ) -> None:
        self.root = root
        self.placement = placement
        self.chance = chance
        self.disk = disk
        self.is_isolated = chance.random() < _ISOLATED
        self.in_background = chance.random() < _IN_BACKGROUND
        self.folder = (root if disk is None else disk.path) / "run"
        self.session: Session | None = None
        self.is_done = False
        self.struck: list[Struck] = []
        self.most = _MOST[placement.name]
        self.damaged: set[int] = set()
        """Checkpoints that were damaged on purpose."""
        self._base = placement.name
        self._untouched = untouched
        self._changed_at: int | None = None
        self._run = write_run(root, placement, isolate=self.is_isolated, background=self.in_background)

    @property
    def base(self) -> str:
        """Name of the placement it began in."""
        return self._base

    # Sessions

    def start(self, *, with_run_file: bool = False) -> Session:
        """A session that goes on with the folder, or begins in it."""
        assert self.session is None
        flags = self.flags(with_run_file=with_run_file)
        if "--resume" not in flags:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.session = Session(self.root, self.folder, self.placement, *flags)
        return self.session

    def flags(self, *, with_run_file: bool = False) -> list[str]:
        """A resume takes the run file or, where it may, the folder's own config."""
        if not (self.folder / ".lock").exists():
            return [str(self._run)]
        may_do_without = (self.folder / "config.yaml").exists() and self._changed_at is None
        run = [] if may_do_without and not with_run_file and self.chance.random() < 0.5 else [str(self._run)]
        return [*run, "--resume", "auto", "--restart"]

    def alive(self) -> Session:
        assert self.session is not None
        return self.session

    def end(self, *allowed: tuple[int, str]) -> tuple[int, str]:
        """The session's end, with what must hold of it and of the folder then."""
        session = self.alive()
        ended = session.end(*allowed)
        self.session = None
        for trap in TRAPS:
            (self.root / trap).unlink(missing_ok=True)
        if ended == DONE:
            self.check_done()
        else:
            self.check_begun()
        if ended[0] >= 0:
            left = [path for path in (self.root / "tmp").iterdir() if not path.name.startswith("ray")]
            if left:
                raise Wrong(f"left in the folder for temporary files: {left}")
        else:  # nobody was there to remove them
            shutil.rmtree(self.root / "tmp")
        return ended

    def whole(self) -> list[int]:
        """Steps of the checkpoints that a resume can take, oldest first."""
        steps = steps_saved(self.folder)
        return [step for step in steps if find_damage(self.folder / f"checkpoints/step-{step}") is None]

    def check_done(self) -> None:
        check_done(self.folder, self._untouched, self._changed_at)
        self.is_done = True

    def check_begun(self) -> None:
        self.damaged = {step for step in self.damaged if step not in self.whole()}
        check_begun(self.folder, self._untouched, self._changed_at, sorted(self.damaged))

    def moved(self, placement: Placement) -> None:
        """Go on elsewhere: from here, the values need not be the untouched run's."""
        self.placement = placement
        self._run.unlink()
        self._run = write_run(self.root, placement, isolate=self.is_isolated, background=self.in_background)
        self._changed_at = max(self.whole(), default=0)
        self.most = min(self.most, len(self.struck) + 3)

    def falls_back(self, step: int) -> None:
        """Go on from an older checkpoint: what was trained before it was moved is made again."""
        if self._changed_at is not None:
            self._changed_at = min(self._changed_at, step)

    def stop(self) -> None:
        """Let no session go on, for what is done to a folder at rest; it has begun."""
        if self.session is None and not self.is_done:
            if (self.folder / "config.yaml").exists():
                return
            self.start()
        if self.session is not None:
            if self.session.reach(self.chance, from_start=False) is None:
                self.end(DONE)
                return
            self.session.kill()
            self.session = None
            self.check_begun()
            shutil.rmtree(self.root / "tmp", ignore_errors=True)

    # Faults

    def strike(self, name: str, strike: Callable[[Chain], str | None], *, at_rest: bool, from_start: bool) -> None:
        """One fault, at a moment of a session or between two. Raises `Missed`, or `Wrong`."""
        if at_rest:
            self.stop()
            moment: str | None = "done" if self.is_done else "at rest"
        else:
            session = self.session or self.start()
            moment = session.reach(self.chance, from_start=from_start)
            if moment is None:
                self.end(DONE)
                self.settle()
                raise Missed
        self.struck.append(Struck(name, str(moment)))
        try:
            said = strike(self)
        except Missed:
            self.struck.pop()
            raise
        self.struck[-1].detail = said or ""
        if self.session is not None and self.session.is_over:
            self.end(DONE)

    def settle(self) -> None:
        """All that struck was mended."""
        for each in self.struck:
            each.outcome = each.outcome or ("equal" if self._changed_at is None else "promised")

    def finish(self) -> None:
        """Let it come to its end; a resume of a run that is done changes nothing."""
        for _ in range(1 if self.is_done else 2):
            if self.session is None:
                self.start()
            self.end(DONE)
        self.settle()

    def abandon(self, problem: str) -> None:
        """What struck last was not mended."""
        if self.session is not None:
            self.session.kill()
            self.session = None
        if not self.struck or self.struck[-1].outcome is not None:
            self.struck.append(Struck("none", "between two"))
        self.settle()  # the sessions after the others found the folder right
        self.struck[-1].outcome = "failed"
        self.struck[-1].detail = problem


@contextmanager
def chain(
    root: Path, placement: Placement, untouched: Untouched, chance: random.Random, *, may_mount: bool
) -> Iterator[Chain]:
    """A new folder; when it is left, nothing of its sessions runs, and what they left in shared memory is an error."""
    root.mkdir(parents=True)
    before = shared_memory()
    with ExitStack() as stack:
        is_on_a_disk = may_mount and chance.random() < _ON_A_DISK
        disk = stack.enter_context(small_disk(root / "disk")) if is_on_a_disk else None
        made = Chain(root, placement, untouched, chance, disk)
        try:
            yield made
        finally:
            if made.session is not None:
                made.session.kill()
        check_shared_memory(before)


def pause(chance: random.Random, longest_seconds: float) -> None:
    time.sleep(chance.random() * longest_seconds)
