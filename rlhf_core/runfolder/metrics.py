"""Values of `metrics.jsonl`, including times."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

NONFINITE = "nonfinite"


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain JSON numbers. Values that are not finite become null, and `nonfinite` lists them by name.

    Example:
        >>> finite({"loss": math.nan, "step": 3})
        {'loss': None, 'step': 3, 'nonfinite': {'loss': 'nan'}}
    """
    line: dict[str, Any] = {}
    broken: dict[str, str] = {}
    for key, value in values.items():
        plain = value if isinstance(value, int | float) else float(value)  # also NumPy and one-element tensors
        line[key] = plain if math.isfinite(plain) else None
        if line[key] is None:
            broken[key] = str(plain)
    return {**line, NONFINITE: broken} if broken else line


class PhaseTimer:
    """Measures the seconds of each phase of an episode. A nested phase pauses the outer one's clock.

    Example:
        timer = PhaseTimer()
        with timer.phase("rollout"):
            answers = engine.generate(requests)
        metrics |= timer.take()  # {"time/rollout_s": …}
    """

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
        """Add time that was measured elsewhere, for example by a maker."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self, name: str) -> float:
        return self._seconds.get(name, 0.0)

    def take(self) -> dict[str, float]:
        """Return `time/<phase>_s` since the last call, and reset the counts."""
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
