"""Entry point of the transport `ray`."""

from __future__ import annotations

from rlhf_core import Component

from .config import RayConfig

ray = Component(
    summary="Makers and trainers are Ray actors that work concurrently, on this machine or on a cluster.",
    config=RayConfig,
    build="rlhf_ray.transport:build",
)
