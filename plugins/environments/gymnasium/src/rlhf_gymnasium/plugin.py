"""The component that this distribution's entry point names."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import GymnasiumConfig

gymnasium = Component(
    summary="An environment of Gymnasium, played in text; its own reward.",
    config=GymnasiumConfig,
    build="rlhf_gymnasium.game:build",
    requires=("gymnasium",),
    install="pip install 'rlhf-gymnasium[gymnasium]'",
)
