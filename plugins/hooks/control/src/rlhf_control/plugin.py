"""The hook plugin `control`, as its entry point declares it."""

from __future__ import annotations

from rlhf_core import Component, Section

control = Component(
    summary="Has a run do what `rlhf control` sends it.",
    config=Section,
    build="rlhf_control.hooks:Control",
    always_on=True,
)
