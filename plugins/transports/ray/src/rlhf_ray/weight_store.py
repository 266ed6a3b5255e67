"""The newest weights of a run: references to their chunks as they come, and which makers hold them whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_core.errors import RlhfError, SyncError

from .messages import Canary, WeightChunk, WeightEnd


class WeightStore:
    """One publication at a time; a new one takes the place of the old, finished or not.

    The chunks of the newest stay, so that a maker that starts later gets them too. Each publication has a serial
    number, since a version can be sent twice (after a resume, say).
    """

    def __init__(self) -> None:
        self._serial = 0
        self._version = -1
        self._adapter_only = False
        self._chunks: list[WeightChunk] = []
        self._end: WeightEnd | None = None
        self._holders: set[str] = set()
        self._errors: dict[str, RlhfError] = {}

    def begin(self, version: int, *, adapter_only: bool) -> None:
        """Open a version; what was there before is dropped."""
        self._serial += 1
        self._adapter_only = adapter_only
        self._version = version
        self._chunks = []
        self._end = None
        self._holders = set()
        self._errors = {}

    def add(self, version: int, role: str, reference: list[Any]) -> None:
        self._check(version)
        index = len(self._chunks)
        self._chunks.append(WeightChunk(self._serial, index, version, self._adapter_only, role, reference))

    def finish(self, version: int, *, checksums: Mapping[str, str], canary: Canary | None) -> None:
        self._check(version)
        self._end = WeightEnd(self._serial, version, self._adapter_only, dict(checksums), canary)

    def next_for(self, serial: int, index: int) -> WeightChunk | WeightEnd | None:
        """What follows the `index` parts a maker has of publication `serial`; None where there is nothing yet."""
        index = index if serial == self._serial else 0
        if index < len(self._chunks):
            return self._chunks[index]
        return self._end if index == len(self._chunks) else None

    def acknowledge(self, maker: str, serial: int, error: RlhfError | None) -> None:
        """A maker holds the whole publication beside its live weights, or refuses it."""
        if serial != self._serial:
            return
        if error is None:
            self._holders.add(maker)
        else:
            self._errors[maker] = error

    def waits_for(self, makers: Iterable[str]) -> list[str]:
        """Those of `makers` that do not have the newest publication yet. Raises what a maker refused it with."""
        for maker, error in self._errors.items():
            raise type(error)(error.message, where=f"{maker}, {error.where}", hint=error.hint)
        return sorted(set(makers) - self._holders)

    def _check(self, version: int) -> None:
        if version != self._version:
            raise SyncError(f"a part of version {version} came while {self._version} is open", where="weight sync")
