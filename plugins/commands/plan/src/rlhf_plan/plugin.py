"""The hook plugin `performance`, as its entry point declares it."""

from __future__ import annotations

from rlhf_core import Component, Section

performance = Component(
    summary="Measures throughput and where the time went: performance.json.",
    config=Section,
    build="rlhf_plan.performance:build",
    always_on=True,
)
