"""`metrics.jsonl`: exactly one line per update, and the times at which values are added to it.

A line is held back until the next event shows whether it is the last of its episode, which gets times and held-out
scores. The order of calls in an episode:

    start_episode -> update, update, … -> end_episode -> [evaluation] -> flush

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

from ..errors import CheckpointError, RlhfError
from ..util.jsonl import LineFile, dump_line, truncate_lines

Number = SupportsFloat | SupportsIndex
Line = dict[str, Any]

NONFINITE = "nonfinite"
PHASES = ("rollout", "reward", "train", "sync")
"""Phases of an episode's time: `time/<phase>_s`."""


class MetricsWriter:
    """Writes `metrics.jsonl`. Use as a context manager, or call `close`."""

    def __init__(self, path: Path, *, on_line: Callable[[Line], object] | None = None, step: int = 0) -> None:
        """`on_line` is called with every written line; `step` is the last one already in the file."""
        self._path = path
        self._on_line = on_line
        self._step = step
        self._held: Line | None = None
        self._episode: Line = {}
        self._file = LineFile(path)

    @classmethod
    def resume(cls, path: Path, *, step: int, on_line: Callable[[Line], object] | None = None) -> MetricsWriter:
        """Truncate the file after `step` and continue from there.

        Raises:
            CheckpointError: lines up to `step` are missing.
            DataError: one of them is torn.
        """
        kept = truncate_lines(path, "step", step)
        last = int(kept["step"]) if kept else 0
        if last != step:
            raise CheckpointError(
                f"ends at step {last}, the checkpoint is at step {step}",
                where=str(path),
                hint="resume from an older checkpoint, or start anew with another --output",
            )
        return cls(path, on_line=on_line, step=step)

    @property
    def step(self) -> int:
        """Updates so far: the step of the newest line, written or held."""
        return self._step

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

    def end_episode(self, values: Mapping[str, Number]) -> None:
        """Put times and throughput on the episode's last line (an episode without update has none)."""
        if self._held is not None:
            self._held.update(values)

    @property
    def holds_line(self) -> bool:
        """Whether there is a line that times and held-out scores can still be put on."""
        return self._held is not None

    def evaluation(self, values: Mapping[str, Number]) -> None:
        """Put `eval/*` on the held line; call it before `flush`."""
        if self._held is None:
            raise ValueError("an evaluation follows an update; the one before the first belongs in the summary")
        self._held.update(values)

    def flush(self, *, sync: bool = False) -> None:
        """Write the held line, and, with `sync`, everything to the disk (before a checkpoint)."""
        held, self._held = self._held, None
        if held is not None:
            line = finite(held)
            self._on_disk(lambda: self._file.append(dump_line(line)))
            if self._on_line is not None:
                self._on_line(line)
        if sync:
            self._on_disk(self._file.sync)

    def _on_disk(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            raise RlhfError(
                f"metrics cannot be written: {error.strerror}",
                where=str(self._path),
                hint="the last checkpoint is intact: free some space and start again with --resume auto",
            ) from error

    def close(self) -> None:
        """Write the held line and close the file; a second call does nothing."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def finite(values: Mapping[str, Any]) -> Line:
    """Plain JSON numbers; values that are not finite become null and are named under `nonfinite`."""
    line: Line = {}
    broken: dict[str, str] = {}
    for key, value in values.items():
        plain = _plain(value)
        if isinstance(plain, float) and not math.isfinite(plain):
            broken[key] = str(plain)
            line[key] = None
        else:
            line[key] = plain
    if broken:
        line[NONFINITE] = broken
    return line


def _plain(value: Any) -> int | float:
    """A Python number of a number-like value (NumPy and one-element tensors included)."""
    if isinstance(value, bool | int | float):
        return value
    return float(value)


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
