"""The transport `local` as a component, like any plugin's."""

from __future__ import annotations

from ..components import Component
from ..config.processes import TransportConfig


class LocalConfig(TransportConfig):
    """Options of `local`, which adds none: maker and trainer share one process per rank."""


local = Component(
    summary="Sample and train in this process (or in the processes of --num-processes).",
    config=LocalConfig,
    build="rlhf_core.transports.local:build",
)
