"""Components named by this distribution's entry points."""

from __future__ import annotations

from rlhf_core.components import Component
from rlhf_episodes.several_section import SeveralConfig

from .config import ConversationConfig, GuessesConfig, GuessNumberConfig, ToolsConfig, UserConfig

guess_number = Component(
    summary="Find a number with higher or lower as hints. Reward 1 if found, else 0. Includes a quickstart.",
    config=GuessNumberConfig,
    build="rlhf_environments.guess_number:build",
    quickstart="rlhf_environments:quickstart",
)
guesses = Component(
    summary="Games for the environment guess-number, with random guesses in its format for a warm start.",
    config=GuessesConfig,
    build="rlhf_environments.guesses:build",
)
conversation = Component(
    summary="User turns from the dataset, in order. Reward by `rewards`.",
    config=ConversationConfig,
    build="rlhf_environments.conversation:build",
)
tools = Component(
    summary="Functions of Python files as tools, and Python in a sandbox. Reward by `rewards`.",
    config=ToolsConfig,
    build="rlhf_environments.tools:Tools",
    isolate=True,
)
several = Component(
    summary="Several environments in one run, by shares or by a key of the prompt's record.",
    config=SeveralConfig,
    build="rlhf_episodes.several:build",
)
user = Component(
    summary="Another model plays the user, with a persona and a goal from the prompt's record. Reward by `rewards`.",
    config=UserConfig,
    build="rlhf_environments.user:build",
)
