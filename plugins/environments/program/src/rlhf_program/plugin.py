"""Component named by this distribution's entry point."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import ProgramConfig

program = Component(
    summary="A command-line agent in a sandbox. Its calls of OpenAI's or Anthropic's API are the policy's turns.",
    config=ProgramConfig,
    build="rlhf_program.environment:build",
)
