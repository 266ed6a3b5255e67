"""Options of the environment `gymnasium`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config import Section


class GymnasiumConfig(Section):
    """Options of the environment `gymnasium`."""

    env_id: str = Field(min_length=1, description="Argument of gymnasium.make, such as FrozenLake-v1.")
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the environment, such as {is_slippery: false}."
    )
    instructions: str = Field("", description="Text before the first observation: the task and the format of actions.")
    observation: str = Field(
        "{observation}",
        min_length=1,
        description="Format of observations: text that contains {observation} (JSON) or {render} (render_mode ansi, "
        "colored text in brackets), or FILE.py:FUNCTION that converts (observation, info) to text.",
    )
    actions: list[str] = Field(
        default_factory=list,
        description="Names of a Discrete space's actions, in the order of their numbers. The last name in a reply, as "
        "a whole word in any case, is the action. Without names, the last integer is the action.",
    )
    read_action: str | None = Field(
        None,
        description="FILE.py:FUNCTION that takes a reply's text and returns the action, or None if there is none. "
        "Required for spaces that are not Discrete.",
    )
    invalid_action: Literal["tell", "end"] = Field(
        "tell", description="For a reply without an action: report it and repeat the observation, or end the episode."
    )
    invalid_reward: float = Field(0.0, description="Reward of a turn without an action.")

    @model_validator(mode="after")
    def _check_actions(self) -> GymnasiumConfig:
        if self.read_action is not None and ".py:" not in self.read_action:
            raise ValueError(f"read_action: {self.read_action!r} is not FILE.py:FUNCTION")
        if self.read_action is not None and self.actions:
            raise ValueError("read_action does not use `actions`: remove one of them")
        folded = [name.strip().casefold() for name in self.actions]
        if "" in folded:
            raise ValueError("actions: a name is empty")
        if twice := next((name for name in folded if folded.count(name) > 1), None):
            raise ValueError(f"actions: two are named {twice!r}")
        return self
