"""The entry points of the offline algorithms."""

from __future__ import annotations

from rlhf_core import Component

from .config import SFTConfig

sft = Component(
    summary="Supervised fine-tuning: cross-entropy on the completions of a dataset.",
    config=SFTConfig,
    build="rlhf_offline.sft:build",
    feeds="dataset",
)
