"""Where the actors go: what each needs is reserved before any is started, within a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rlhf_core.errors import RlhfError

from .config import RayConfig


@dataclass(frozen=True, slots=True)
class Demand:
    """What one actor reserves."""

    name: str
    num_cpus: float
    num_gpus: float

    @property
    def bundle(self) -> dict[str, float]:
        return {kind: amount for kind, amount in (("CPU", self.num_cpus), ("GPU", self.num_gpus)) if amount > 0}


class Placement:
    """Places for the actors of a run. Actors that reserve nothing go anywhere, those that do into one group."""

    def __init__(self, demands: Sequence[Demand], config: RayConfig) -> None:
        self._demands = {demand.name: demand for demand in demands}
        self._strategy = config.placement.upper()
        self._reserving = [demand for demand in demands if demand.bundle]
        self._group: Any = None
        if self._reserving:
            self._group = ray.util.placement_group(
                [demand.bundle for demand in self._reserving], strategy=self._strategy
            )
            self._wait(config.start_timeout_seconds)

    def options(self, name: str) -> dict[str, Any]:
        """For `.options(…)` of the actor."""
        demand = self._demands[name]
        options: dict[str, Any] = {"num_cpus": demand.num_cpus, "num_gpus": demand.num_gpus}
        if demand.bundle:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=self._reserving.index(demand)
            )
        elif self._strategy == "SPREAD":
            options["scheduling_strategy"] = "SPREAD"
        return options

    def release(self) -> None:
        """Give the places back."""
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None

    def _wait(self, timeout_seconds: float) -> None:
        if self._group.wait(timeout_seconds):
            return
        self.release()
        asked = {kind: sum(d.bundle.get(kind, 0.0) for d in self._reserving) for kind in ("CPU", "GPU")}
        there = ray.cluster_resources()
        free = ray.available_resources()
        wanted = ", ".join(f"{amount:g} {kind}" for kind, amount in asked.items() if amount)
        have = ", ".join(f"{there.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in ("CPU", "GPU"))
        raise RlhfError(
            f"waited {timeout_seconds:g} s for room for {', '.join(d.name for d in self._reserving)}: they ask for "
            f"{wanted} together, the {len(ray.nodes())} nodes of the cluster have {have}",
            where="transport",
            hint="lower transport.maker_cpus, maker_gpus, trainer_cpus, trainer_gpus, or the number of actors",
        )


def near_driver() -> dict[str, Any]:
    """Options of an actor whose end is the run's: on the driver's node, so that no other node's end is."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=True)}
