"""Component named by this distribution's entry point."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import VerifiersConfig

verifiers = Component(
    summary="An environment of the library verifiers, played by its agent, with its own tasks and reward.",
    config=VerifiersConfig,
    build="rlhf_env_verifiers.environment:VerifiersEnvironment",
    requires=("verifiers",),
    install="pip install 'rlhf-env-verifiers[verifiers]'",
)
