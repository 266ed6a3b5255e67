"""Entry point of `distill`."""

from __future__ import annotations

from rlhf_core import Component

from .config import DistillConfig

distill = Component(
    summary="On-policy distillation: the policy samples, and teachers (models, servers, or itself) score the tokens.",
    config=DistillConfig,
    build="rlhf_distill.algorithm:build",
    learns_from_rewards=False,
    stages={"teacher": "teacher.path"},
)
