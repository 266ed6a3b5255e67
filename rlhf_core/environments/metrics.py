"""Metrics of the episodes of one iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

ENVIRONMENT: Final = "environment"
"""Name of the environment's reward, and of its metrics."""
OWN: Final = "own/"
"""Begins the names of what an environment measures itself."""
RESERVED: Final = frozenset({"num_turns_mean", "truncated_fraction", "failed_fraction", "bad_tool_calls"})
"""Names under `environment/` that are core's."""


class HasMetrics(Protocol):
    """A record of an episode: a sample of it, or its row of an evaluation."""

    @property
    def environment(self) -> Mapping[str, float]: ...


def environment_metrics(items: Sequence[HasMetrics]) -> dict[str, float]:
    """`environment/*` and `response/observation_fraction` of the samples; nothing where none came from one.

    Means are over episodes, those of an environment's own metrics over the episodes that report them;
    `environment/bad_tool_calls` is their number.
    """
    episodes = [item.environment for item in items if item.environment]
    if not episodes:
        return {}
    response = _total(episodes, "response_tokens")
    metrics = {
        "environment/num_turns_mean": _total(episodes, "num_turns") / len(episodes),
        "environment/truncated_fraction": _total(episodes, "truncated") / len(episodes),
        "environment/failed_fraction": _total(episodes, "failed") / len(episodes),
        "environment/bad_tool_calls": _total(episodes, "bad_tool_calls"),
        "response/observation_fraction": _total(episodes, "observation_tokens") / response if response else 0.0,
    }
    for key in sorted({key for each in episodes for key in each if key.startswith(OWN)}):
        values = [each[key] for each in episodes if key in each]
        metrics[f"environment/{key.removeprefix(OWN)}"] = sum(values) / len(values)
    return metrics


def _total(episodes: Sequence[Mapping[str, float]], key: str) -> float:
    return sum(each[key] for each in episodes)
