"""The hook plugin `performance`, named by its entry point."""

from __future__ import annotations

from rlhf_core import Component, Section

performance = Component(
    summary="Measures throughput and time per phase, and writes performance.json.",
    config=Section,
    build="rlhf_plan.performance:build",
    always_on=True,
)
