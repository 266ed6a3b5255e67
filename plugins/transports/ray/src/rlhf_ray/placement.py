"""Room for actors in the cluster: placement groups, and what is missing where there is none."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from rlhf_core.errors import RlhfError

from .config import RayConfig

_NAMED = 8
"""Most actors that an error names."""
Demands = Mapping[str, tuple[float, float]]
"""Actor name -> CPUs and GPUs that it reserves."""


class Placement:
    """Room for some actors: those that reserve resources get it in one placement group, the others are anywhere."""

    def __init__(self, demands: Demands, config: RayConfig) -> None:
        self._demands = demands
        self._strategy = config.placement.upper()
        kinds = {name: {"CPU": cpus, "GPU": gpus} for name, (cpus, gpus) in demands.items() if cpus or gpus}
        self.bundles = {name: {k: v for k, v in bundle.items() if v} for name, bundle in kinds.items()}
        """Actor name -> what it reserves."""
        self._group: Any = None
        if self.bundles:
            self._group = ray.util.placement_group(list(self.bundles.values()), strategy=self._strategy)

    def __contains__(self, name: str) -> bool:
        return name in self._demands

    def __len__(self) -> int:
        return len(self._demands)

    def is_ready(self, timeout_seconds: float = 0.0) -> bool:
        """Whether the cluster has made room, within the timeout."""
        return self._group is None or bool(self._group.wait(timeout_seconds))

    def options(self, name: str) -> dict[str, Any]:
        """Arguments of `.options(…)` for the actor."""
        cpus, gpus = self._demands[name]
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus}
        if name in self.bundles:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=list(self.bundles).index(name)
            )
        elif self._strategy == "SPREAD":
            options["scheduling_strategy"] = "SPREAD"
        return options

    def release(self) -> None:
        """Release the reserved resources."""
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None


def places(trainers: Demands, makers: Demands, config: RayConfig) -> list[Placement]:
    """Room for a whole run. Raises `RlhfError` where there is not enough.

    A maker's room is its own, so that it can be given back alone; with `placement: spread` all share one group, since
    Ray spreads the members of a group only.
    """
    if config.placement == "spread":
        asked: list[Demands] = [{**trainers, **makers}]
    else:
        asked = [trainers, *({name: demand} for name, demand in makers.items())]
    found = [Placement(demands, config) for demands in asked]
    deadline = time.monotonic() + config.start_timeout_seconds
    if all(place.is_ready(max(0.0, deadline - time.monotonic())) for place in found):
        return found
    told = lacking(found)
    for place in found:
        place.release()
    raise RlhfError(
        f"waited {config.start_timeout_seconds:g} s for room for {told}",
        where="transport",
        hint="lower transport.maker_cpus, maker_gpus, trainer_cpus, trainer_gpus, or the number of actors",
    )


def lacking(placements: Iterable[Placement]) -> str:
    """Text on those for which there is no room: what they ask for, which is what is missing, and what there is."""
    bundles = {name: bundle for place in placements if not place.is_ready() for name, bundle in place.bundles.items()}
    asked: Counter[str] = Counter()
    for bundle in bundles.values():
        asked.update(bundle)
    there = ray.cluster_resources()
    free = ray.available_resources()
    wanted = ", ".join(f"{amount:g} {kind}" for kind, amount in asked.items())
    have = ", ".join(f"{there.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in ("CPU", "GPU"))
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    return f"{_listed(list(bundles))}: they ask for {wanted} together, the {nodes} nodes of the cluster have {have}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def near_driver() -> dict[str, Any]:
    """Options of an actor the run cannot lose: on the driver's node, so the run survives the loss of any other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=True)}
