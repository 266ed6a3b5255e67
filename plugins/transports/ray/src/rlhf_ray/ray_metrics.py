"""A run's figures on Ray's own metrics endpoints (`ray.util.metrics`), beside those of Ray's.

Ray serves them, with `ray_` before each name, on every node that has a metrics agent (`pip install "ray[default]"`);
without one they go nowhere and cost next to nothing. The names are in the README.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray.util.metrics import Gauge

from .messages import Overview

_RUN = {
    "rlhf_policy_version": "Newest policy version that the trainer has published.",
    "rlhf_makers": "Makers that take prompts.",
    "rlhf_makers_wanted": "Makers that the run is to have.",
    "rlhf_queue_groups": "Prompts whose samples are finished and wait to be trained on.",
    "rlhf_sync_seconds": "Time that the last version took to all makers.",
}
_ACTOR = {
    "rlhf_actor_busy": "Share of its time in which the actor worked.",
    "rlhf_actor_restarts": "Times that the actor was started anew.",
    "rlhf_maker_groups": "Prompts that the maker has finished, since it was last started.",
    "rlhf_maker_making": "Prompts that the maker has in the making.",
    "rlhf_maker_waiting_groups": "Finished prompts of the maker that wait to be trained on.",
    "rlhf_maker_policy_version": "Policy version of the maker's weights.",
}


class RayMetrics:
    """The gauges of one run; a hook of the driver, which is told what each episode measured."""

    def __init__(self, run: str) -> None:
        """run: name of the run folder; a tag of every figure."""
        self._tags = {"run": run}
        self._of_run = {name: Gauge(name, text, tag_keys=("run",)) for name, text in _RUN.items()}
        self._of_actor = {name: Gauge(name, text, tag_keys=("run", "actor")) for name, text in _ACTOR.items()}
        self._metric = Gauge("rlhf_metric", "A figure of metrics.jsonl, by name.", tag_keys=("run", "name"))

    def rlhf_episode_end(self, metrics: Mapping[str, Any] | None) -> None:
        """Export what an episode's line in `metrics.jsonl` says."""
        for name, value in (metrics or {}).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._metric.set(float(value), {**self._tags, "name": name})

    def export(self, view: Overview, rows: Sequence[Mapping[str, Any]], wanted: int) -> None:
        """Export the newest state of the run and of each actor. wanted: makers that the run is to have."""
        there = sum(row["pid"] is not None and row["name"].startswith("maker") for row in rows)
        values = (view.version, there, wanted, view.queue, view.sync_seconds)
        for gauge, value in zip(self._of_run.values(), values, strict=True):
            if value is not None:
                gauge.set(float(value), self._tags)
        for row in rows:
            tags = {**self._tags, "actor": str(row["name"])}
            keys = ("busy", "restarts", "groups", "making", "waiting", "version")
            for gauge, key in zip(self._of_actor.values(), keys, strict=True):
                if row.get(key) is not None:
                    gauge.set(float(row[key]), tags)
