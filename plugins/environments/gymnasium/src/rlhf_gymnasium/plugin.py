"""Component named by this distribution's entry point."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import GymnasiumConfig

gymnasium = Component(
    summary="A Gymnasium environment, played in text, with its own reward.",
    config=GymnasiumConfig,
    build="rlhf_gymnasium.game:build",
    requires=("gymnasium",),
    install="pip install 'rlhf-gymnasium[gymnasium]'",
)
