"""Metrics of environments, over the samples of one training episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ..columns import Column

ENVIRONMENT: Final = "environment"
"""Name of the environment's reward, and of the column with its metrics, which the first row of an episode has."""
EPISODE_COLUMNS: Final[Mapping[str, Column]] = {ENVIRONMENT: Column(per="metrics"), "turn_rewards": Column()}
"""Columns of rows from a player that returns rewards: the episode's metrics, and the rewards of its turns."""
OWN: Final = "own/"
"""Prefix of the environment's own metrics."""
RESERVED: Final = frozenset({"num_turns_mean", "truncated_fraction", "failed_fraction", "bad_tool_calls"})
"""Names under `environment/` that core uses."""


def environment_metrics(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return `environment/*` and `response/observation_fraction` of samples. Empty without an environment.

    Values are means over episodes. An environment's own metrics are averaged over the episodes that report them.
    `environment/bad_tool_calls` is a sum.
    """
    episodes = [each for each in samples if each]
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
