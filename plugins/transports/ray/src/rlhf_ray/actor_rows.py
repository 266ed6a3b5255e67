"""A row for each actor of a run, with what it does and did: for `ray.json`, the report and Ray's metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .messages import Overview

if TYPE_CHECKING:
    from .actors import Actors
    from .fleet import Fleet

Row = Mapping[str, Any]


class ActorRows:
    """The newest rows; also of makers that are gone, for the report."""

    def __init__(self) -> None:
        self.makers: list[Row] = []
        """Rows of those that are there, come or leave."""
        self.trainers: list[Row] = []
        self._ever: dict[str, Row] = {}
        """Id of a maker -> its last row; one that was started anew has several ids."""
        self._restarts: dict[str, int] = {}

    def update(self, view: Overview, actors: Actors, fleet: Fleet) -> None:
        """Take in the newest state."""
        known = {str(row["name"]): row for row in view.makers}
        self._ever |= known
        self._restarts |= {maker.name: maker.attempt for maker in (*actors.makers, *fleet.leaving)}
        rows = [
            {**_bare(maker.id, "loads its models"), **known.get(maker.id, {}), "restarts": maker.attempt}
            for maker in actors.makers
        ]
        for maker in fleet.leaving:
            needed = view.owned.get(maker.id, 0)
            bare = _bare(maker.id, f"has left; {needed} of its groups wait to be trained on")
            rows.append({**bare, **known.get(maker.id, {}), "restarts": maker.attempt, "leaving": True})
        self.makers = [*rows, *(_bare(name, "waits for room in the cluster") for name in fleet.waiting_for_room)]
        self.trainers = [
            {"name": t.name, "pid": t.pid, "node": t.node, **view.trainers.get(t.name, {})} for t in actors.trainers
        ]

    def over_the_run(self) -> list[dict[str, Any]]:
        """A row for each actor that there ever was: where its time went, what it made, how often it was restarted."""
        makers: dict[str, dict[str, Any]] = {}
        for name, row in self._ever.items():
            base = name.partition(".")[0]
            sums = makers.setdefault(base, {"busy_s": 0.0, "groups": 0, "idle_s": defaultdict(float)})
            sums["busy_s"] += row["busy_s"]
            sums["groups"] += row["groups"]
            sums["version"] = row["version"]
            for why, seconds in row["idle_s"].items():
                sums["idle_s"][why] += seconds
        rows = [{"name": name, **sums, "restarts": self._restarts.get(name, 0)} for name, sums in makers.items()]
        trainers: list[dict[str, Any]] = [
            {"name": row["name"], "busy_s": row["busy_s"], "idle_s": {"waits for samples": row["waited_s"]}}
            for row in self.trainers
            if "busy_s" in row
        ]
        return [*trainers, *sorted(rows, key=lambda row: (len(row["name"]), row["name"]))]


def _bare(name: str, doing: str) -> dict[str, Any]:
    return {"name": name, "pid": None, "node": None, "doing": doing, "for_s": 0.0, "version": None, "restarts": 0}
