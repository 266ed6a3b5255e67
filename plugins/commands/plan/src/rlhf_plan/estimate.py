"""Estimates a run's memory in its own layout, and finds the smallest layout that fits the available memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_core.config import ResolvedRun
from rlhf_core.wiring import RunInputs

from .layouts import Layout, smallest_layout
from .memory import MemoryEstimate, ProcessPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Estimated memory of a run."""

    num_parameters: int
    num_trainable: int
    device: str
    """`cpu` or `cuda`."""
    tokens_per_sample: float
    """Mean length of the inspected prompts plus the maximum length of an answer."""
    processes: Sequence[ProcessPlan]
    layout: Layout | None = None
    """The smallest layout that fits the memory passed to `plan_run`."""

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, for `--json`."""
        layout = None if self.layout is None else {**asdict(self.layout), "processes": _totals(self.layout.processes)}
        return {**asdict(self), "processes": _totals(self.processes), "layout": layout}


def _totals(processes: Sequence[ProcessPlan]) -> list[dict[str, Any]]:
    return [{**asdict(each), "total_bytes": each.total_bytes} for each in processes]


def plan_run(
    resolved: ResolvedRun, inputs: RunInputs, num_processes: int = 1, *, memory_bytes: int | None = None
) -> Plan:
    """Estimate the memory of a checked run. Loads only the weights of built-in models.

    Args:
        resolved: the run.
        inputs: the objects that checking the run has built.
        num_processes: number of training processes, unless the transport starts its own.
        memory_bytes: memory of one process. If set, the plan includes the smallest layout that fits.
    """
    estimate, own = MemoryEstimate(resolved, inputs), resolved.own_processes
    return Plan(
        num_parameters=estimate.shape.num_parameters,
        num_trainable=estimate.shape.num_trainable,
        device=estimate.device,
        tokens_per_sample=estimate.tokens_per_sample,
        processes=estimate.processes(resolved, num_processes if own is None else own.trainers),
        layout=None if memory_bytes is None else smallest_layout(resolved, memory_bytes, estimate.processes),
    )
