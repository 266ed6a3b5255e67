"""Checks that a run's strategy and algorithm fit its transport."""

from __future__ import annotations

from dataclasses import replace

from .problems import Problems
from .processes import other_strategies, too_many
from .section import PolicyLossSection, TransportConfig
from .selected import Configured


def fit_to_transport(chosen: dict[str, Configured | None], problems: Problems) -> None:
    """Hold the transport's own processes against the strategy; weigh late samples where it brings such."""
    transport, strategy, algorithm = chosen["transport"], chosen["strategy"], chosen["algorithm"]
    engine = chosen["engine"]
    if transport is None:
        return
    assert isinstance(transport.config, TransportConfig)
    own = transport.config.own_processes()
    if own is not None and strategy is not None and (problem := too_many(strategy, own.trainers)):
        hint = other_strategies(own.trainers)
        problems.add(f"transport.{own.option}", f"{problem}, not {own.trainers}; {hint}")
    if transport.config.updates_in_flight() and engine is not None and not engine.component.in_flight:
        problem = f"the engine {engine.name} takes new weights between two batches only"
        problems.add("transport.weights", problem, "say weights: between-batches, or take an engine made for it")
    late = transport.config.staleness_bound() > 0
    if late and algorithm is not None and isinstance(algorithm.config, PolicyLossSection):
        chosen["algorithm"] = replace(algorithm, config=algorithm.config.weighing_late_samples())
