"""Options of the environment `openenv`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from rlhf_core.config import Section
from rlhf_web import address_parts


class OpenEnvConfig(Section):
    """Options of the environment `openenv`."""

    base_url: str = Field(description="Address of the server, such as http://localhost:8000; also https, ws and wss.")
    reset: dict[str, Any] = Field(
        default_factory=dict, description="Options of the environment's reset, besides the task's seed."
    )
    instructions: str = Field("", description="Text before the first observation: what to do, and how to say it.")
    action_field: str | None = Field(
        None,
        min_length=1,
        description="Field of an action that holds a reply's text; null: the reply has the action as a JSON object.",
    )
    observation_field: str | None = Field(
        None, min_length=1, description="Field of an observation that the policy is shown; null is all, as JSON."
    )
    invalid_reward: float = Field(0.0, description="Reward of a turn without an action that the environment takes.")

    @field_validator("reset")
    @classmethod
    def _leaves_the_seed(cls, reset: dict[str, Any]) -> dict[str, Any]:
        if "seed" in reset:
            raise ValueError("the seed is the task's: take it out")
        return reset

    @field_validator("base_url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        parts = address_parts(url, form="http://HOST[:PORT]", schemes=("http", "https", "ws", "wss"))
        if parts.query or parts.fragment:
            raise ValueError("should have no ? and no #")
        return url
