"""The contents of a journal's files: turns, steps and finished episodes, by version of the weights and by sample."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.errors import DataError
from rlhf_core.util.jsonl import read_lines

from ..progress import RESET
from .records import Record

logger = logging.getLogger(__name__)

Trajectory = tuple[int, int]
"""Number of rollbacks before, and version of the weights."""


@dataclass(slots=True)
class KnownSample:
    """Recorded lines of one sample under one version of the weights."""

    turns: dict[str, Record] = field(default_factory=dict)
    """Key of a request -> completion."""
    steps: list[Record] = field(default_factory=list)
    """Steps of the last attempt, from its reset."""
    episode: Record | None = None
    """The finished episode."""

    def add(self, line: Record) -> None:
        """Add a line. Raises `KeyError` or `TypeError` if it is damaged."""
        if "turn" in line:
            self.turns[line["turn"]] = line["completion"]
        elif "step" in line:
            step = line["step"]
            if step["turn"] == RESET:
                self.steps = []
            self.steps.append(step)
        else:
            self.episode = line["episode"]

    @property
    def is_continuous(self) -> bool:
        """Whether the steps start with a reset and none is missing."""
        return [step["turn"] for step in self.steps] == list(range(RESET, RESET + len(self.steps)))


class Known:
    """Lines of earlier attempts of a run, and of other processes."""

    def __init__(self) -> None:
        """Start empty."""
        self.samples: dict[Trajectory, dict[tuple[int, str], KnownSample]] = defaultdict(dict)
        """Sample id and digest of its task -> lines."""
        self.probes: dict[Trajectory, Record] = {}
        """Line of a turn with its request."""
        self.newest: dict[Path, int] = {}
        """File -> newest version in it."""

    def load(self, paths: Iterable[Path], run: str, version: int) -> None:
        """Read files. Those of a run with other options, and lines after damage, are left out.

        Args:
            paths: Files in the order in which they were written.
            run: Digest of the run's options.
            version: Version of the weights. Lines of older versions are left out.
        """
        for path in paths:
            self.newest[path] = -1
            try:
                for number, line in enumerate(read_lines(path)):
                    if number == 0 and line.get("run") != run:
                        logger.info("%s is not used: its turns were recorded with other options", path)
                        break
                    if number:
                        self._add(path, line, version)
            except (DataError, KeyError, TypeError, ValueError, OSError) as error:
                logger.warning("the rest of %s is not used, so its turns are sampled again: %s", path, error)
            if self.newest[path] < 0:  # kept as long as a file that begins now
                self.newest[path] = version

    def _add(self, path: Path, line: Record, oldest: int) -> None:
        rollbacks, version = map(int, line["at"])
        self.newest[path] = max(self.newest[path], version)
        if version < oldest:
            return
        samples = self.samples[rollbacks, version]
        samples.setdefault((int(line["sample"]), str(line["task"])), KnownSample()).add(line)
        if "probe" in line:
            self.probes.setdefault((rollbacks, version), line)

    @property
    def max_rollbacks(self) -> int:
        """Number of rollbacks before the last lines."""
        return max((rollbacks for rollbacks, _ in self.samples), default=0)

    def forget(self, *, before: int | None = None, since: int | None = None) -> None:
        """Forget lines of versions below `before`, and of `since` and above."""
        for trajectory in list(self.samples):
            if (before is not None and trajectory[1] < before) or (since is not None and trajectory[1] >= since):
                del self.samples[trajectory]
