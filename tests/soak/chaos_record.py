"""What became of every fault: a line each, from which a run that was stopped goes on, and a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos_chain import Outcome, Struck


@dataclass(frozen=True, slots=True)
class Line:
    """A fault that struck."""

    placement: str
    seed: int
    chain: int
    fault: str
    moment: str
    outcome: Outcome
    detail: str


CHAINS_PER_PART = 1000
"""Numbers of chains that a part of a placement's faults may use, so that parts do not depend on each other."""


class Record:
    """`faults.jsonl`, as one part of a placement's faults reads and writes it; the table is written next to it."""

    def __init__(self, path: Path, placement: str, seed: int, part: int) -> None:
        self._path = path
        self._placement = placement
        self._seed = seed
        self._part = part

    def lines(self) -> list[Line]:
        """All that there are, of every placement and seed."""
        if not self._path.exists():
            return []
        return [Line(**json.loads(line)) for line in self._path.read_text().splitlines()]

    def own(self) -> list[Line]:
        own = (self._placement, self._seed, self._part)
        return [line for line in self.lines() if (line.placement, line.seed, line.chain // CHAINS_PER_PART) == own]

    def next_chain(self) -> int:
        return 1 + max((line.chain for line in self.own()), default=self._part * CHAINS_PER_PART - 1)

    def add(self, chain: int, struck: Sequence[Struck]) -> None:
        with self._path.open("a") as file:
            for each in struck:
                assert each.outcome is not None
                line = Line(
                    self._placement, self._seed, chain, each.fault, each.moment, each.outcome, each.detail[:4000]
                )
                file.write(json.dumps(asdict(line)) + "\n")
        self._path.with_name("table.md").write_text(table(self.lines()))


def table(lines: Sequence[Line]) -> str:
    """Fault x placement: how many; of these resumed elsewhere, with what is promised there; failed."""
    placements = [name for name in ("local", "ranks", "ray") if any(line.placement == name for line in lines)]
    counts = Counter((line.fault, line.placement, line.outcome) for line in lines)
    names = sorted({line.fault for line in lines})
    rows = [["fault", *placements, "resumed equal", "resumed as promised", "failed"]]
    for name in [*names, "all"]:
        own = [name] if name != "all" else names
        rows.append(
            [
                name,
                *(str(sum(counts[n, p, o] for n in own for o in _OUTCOMES)) for p in placements),
                *(str(sum(counts[n, p, o] for n in own for p in placements)) for o in _OUTCOMES),
            ]
        )
    rows.insert(1, ["---"] * len(rows[0]))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


_OUTCOMES: tuple[Outcome, ...] = ("equal", "promised", "failed")
