"""The hook plugin `control`, named by its entry point."""

from __future__ import annotations

from rlhf_core import Component, Section

control = Component(
    summary="Executes the commands of `rlhf control` in a run.",
    config=Section,
    build="rlhf_control.hooks:Control",
    always_on=True,
)
