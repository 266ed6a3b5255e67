"""The components that this distribution's entry points name."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import ConversationConfig, GuessesConfig, GuessNumberConfig, ToolsConfig

guess_number = Component(
    summary="Find a number, told higher or lower; reward 1 for found, else 0. Brings a quickstart.",
    config=GuessNumberConfig,
    build="rlhf_environments.guess_number:build",
    quickstart="rlhf_environments:quickstart",
)
guesses = Component(
    summary="Games for the environment guess-number, and random guesses in its format for a warm start.",
    config=GuessesConfig,
    build="rlhf_environments.guesses:build",
)
conversation = Component(
    summary="User turns that stand in the dataset, one after another; no reward of its own.",
    config=ConversationConfig,
    build="rlhf_environments.conversation:build",
)
tools = Component(
    summary="Functions of Python files as tools, and a Python interpreter in a sandbox; no reward of its own.",
    config=ToolsConfig,
    build="rlhf_environments.tools:Tools",
    isolate=True,
)
