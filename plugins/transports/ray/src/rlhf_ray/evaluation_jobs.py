"""An evaluation, shared among makers: parts of the held-out prompts, handed out until every one is back."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.rollout import EvaluationRow

from .messages import EvaluationWork


class EvaluationJobs:
    """At most one evaluation at a time."""

    def __init__(self) -> None:
        self._waiting: list[EvaluationWork] = []
        self._held: dict[EvaluationWork, str] = {}
        self._rows: dict[int, Sequence[EvaluationRow]] = {}

    def open(self, num_prompts: int, part_size: int, version: int) -> None:
        """Cut the prompts into parts of `part_size`."""
        starts = range(0, num_prompts, part_size)
        self._waiting = [EvaluationWork(start, min(start + part_size, num_prompts), version) for start in starts]
        self._held = {}
        self._rows = {}

    def take(self, maker: str) -> EvaluationWork | None:
        """The next part, for `maker`."""
        if not self._waiting:
            return None
        work = self._waiting.pop(0)
        self._held[work] = maker
        return work

    def done(self, work: EvaluationWork, rows: Sequence[EvaluationRow]) -> None:
        """Take a part's rows; a part that was answered twice counts once."""
        if self._held.pop(work, None) is not None:
            self._rows[work.start] = rows

    def release(self, maker: str) -> None:
        """The maker is gone: its parts are for others."""
        lost = [work for work, holder in self._held.items() if holder == maker]
        for work in lost:
            del self._held[work]
        self._waiting = sorted([*lost, *self._waiting], key=lambda work: work.start)

    @property
    def complete(self) -> bool:
        return not self._waiting and not self._held

    def rows(self) -> list[EvaluationRow]:
        """All rows, in the order of the prompts."""
        return [row for start in sorted(self._rows) for row in self._rows[start]]

    def describe(self) -> str:
        """In words, what is still missing."""
        return f"{len(self._waiting)} parts wait for a maker, in the making: {sorted(set(self._held.values()))}"
