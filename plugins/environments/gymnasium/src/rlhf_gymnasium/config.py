"""Options of the environment `gymnasium`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config import Section


class GymnasiumConfig(Section):
    """Options of the environment `gymnasium`."""

    env_id: str = Field(min_length=1, description="What gymnasium.make is given, such as FrozenLake-v1.")
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Options of the environment itself, such as {is_slippery: false}."
    )
    instructions: str = Field("", description="Text before the first observation: what to do, and how to say it.")
    observation: str = Field(
        "{observation}",
        min_length=1,
        description="How an observation is written: text with {observation} (JSON) or {render} (render_mode ansi, a "
        "coloured place in brackets) in it, or FILE.py:FUNCTION of (observation, info) that gives a text.",
    )
    actions: list[str] = Field(
        default_factory=list,
        description="Names of a Discrete space's actions, in the order of their numbers. The last of them in a reply, "
        "as a whole word in any case, is the action; without names, the last whole number is.",
    )
    read_action: str | None = Field(
        None,
        description="FILE.py:FUNCTION of (text) that gives the action of a reply, or None where there is none; needed "
        "for spaces that are not Discrete.",
    )
    invalid_action: Literal["tell", "end"] = Field(
        "tell", description="A reply without an action: say so and show the observation again, or end the episode."
    )
    invalid_reward: float = Field(0.0, description="Reward of a turn without an action.")

    @model_validator(mode="after")
    def _says_how_to_act(self) -> GymnasiumConfig:
        if self.read_action is not None and ".py:" not in self.read_action:
            raise ValueError(f"read_action: {self.read_action!r} is not FILE.py:FUNCTION")
        if self.read_action is not None and self.actions:
            raise ValueError("read_action reads the action by itself: take out `actions`")
        folded = [name.strip().casefold() for name in self.actions]
        if "" in folded:
            raise ValueError("actions: a name is empty")
        if twice := next((name for name in folded if folded.count(name) > 1), None):
            raise ValueError(f"actions: two are called {twice!r}")
        return self
