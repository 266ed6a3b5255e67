"""`metrics.jsonl`: exactly one line per update, and the times at which values are added to it.

A line is held back until the next event shows whether it is the last of its episode, which gets times and held-out
scores. The order of calls in an episode:

    start_episode -> update, update, … -> add_to_last, add_to_last -> flush

A value that is not finite is written as null, since JSON has no such number, and named under the line's key
`nonfinite` (`{"loss/policy": "nan"}`). Callers leave out keys without meaning.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex

from .lines import RunLines

Number = SupportsFloat | SupportsIndex
Line = dict[str, Any]

NONFINITE = "nonfinite"


class MetricsWriter:
    """Writes `metrics.jsonl`. Use as a context manager, or call `close`."""

    def __init__(
        self,
        path: Path,
        *,
        step: int = 0,
        count: int | None = None,
        on_line: Callable[[Line], object] | None = None,
    ) -> None:
        """Lines of the file after `step`, the last update so far, are cut; see `RunLines` for `count` and errors.

        on_line: called with every written line.
        """
        self._file = RunLines(path, "step", step, count=count, instead="start anew with another --output")
        self._on_line = on_line
        self._step = step
        self._held: Line | None = None
        self._episode: Line = {}

    def start_episode(self, *, episode: int, policy_version: int | None, values: Mapping[str, Number]) -> None:
        """Begin an episode; `values` (`reward/*`, `kl/*`, `response/*`, …) are put on each of its lines."""
        self.flush()
        self._episode = {"episode": episode}
        if policy_version is not None:
            self._episode["policy_version"] = policy_version
        self._episode.update(values)

    def add_episode_values(self, values: Mapping[str, Number]) -> None:
        """Values of the episode that are known only after its first forward (`rollout/logprob_gap_max`).

        Call it before the episode's first `update`; they are put on each of its lines.
        """
        self._episode.update(values)

    def update(self, values: Mapping[str, Number]) -> None:
        """Add the line of an update, with `step` + 1."""
        self.flush()
        self._step += 1
        self._held = {"step": self._step, **self._episode, **values}

    def add_to_last(self, values: Mapping[str, Number]) -> None:
        """Put times, throughput and held-out scores on the episode's last line; one without an update has none."""
        if self._held is not None:
            self._held.update(values)

    def flush(self, *, sync: bool = False) -> None:
        """Write the held line, and, with `sync`, everything to the disk (before a checkpoint)."""
        held, self._held = self._held, None
        if held is not None:
            line = finite(held)
            self._file.append([line])
            if self._on_line is not None:
                self._on_line(line)
        if sync:
            self._file.sync()

    def close(self) -> None:
        """Write the held line and close the file; a second call does nothing."""
        with self._file:
            self.flush()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def finite(values: Mapping[str, Any]) -> Line:
    """Plain JSON numbers; values that are not finite become null and are named under `nonfinite`."""
    line: Line = {}
    broken: dict[str, str] = {}
    for key, value in values.items():
        plain = value if isinstance(value, int | float) else float(value)  # NumPy and one-element tensors, too
        line[key] = plain if math.isfinite(plain) else None
        if line[key] is None:
            broken[key] = str(plain)
    return {**line, NONFINITE: broken} if broken else line


class PhaseTimer:
    """Seconds per phase of an episode. A nested phase pauses the outer one's clock."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._stack: list[str] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time under `name`: one of `rollout`, `reward`, `train`, `sync`, or another."""
        self._tick()
        self._stack.append(name)
        try:
            yield
        finally:
            self._tick()
            self._stack.pop()

    def add(self, name: str, seconds: float) -> None:
        """Count time that was measured elsewhere (a maker's)."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self, name: str) -> float:
        return self._seconds.get(name, 0.0)

    def take(self) -> dict[str, float]:
        """`time/<phase>_s` since the last call; resets the counts."""
        if self._stack:
            raise RuntimeError(f"phase {self._stack[-1]!r} is still open")
        taken = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken

    def _tick(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self.add(self._stack[-1], now - self._since)
        self._since = now
