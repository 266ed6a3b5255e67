"""Options of the environment `openenv`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from rlhf_core.config import Section
from rlhf_web import address_parts


class OpenEnvConfig(Section):
    """Options of the environment `openenv`."""

    base_url: str = Field(description="Server address, such as http://localhost:8000, or with https, ws or wss.")
    reset: dict[str, Any] = Field(
        default_factory=dict, description="Options of the environment's reset, in addition to the task's seed."
    )
    instructions: str = Field("", description="Text before the first observation: the task and the format of actions.")
    action_field: str | None = Field(
        None,
        min_length=1,
        description="Field of the action for a reply's text. null: the reply contains the action as a JSON object.",
    )
    observation_field: str | None = Field(
        None, min_length=1, description="Field of an observation to show to the policy. null shows all fields as JSON."
    )
    invalid_reward: float = Field(0.0, description="Reward of a turn without a valid action.")

    @field_validator("reset")
    @classmethod
    def _check_seed(cls, reset: dict[str, Any]) -> dict[str, Any]:
        if "seed" in reset:
            raise ValueError("the seed is the task's: remove it")
        return reset

    @field_validator("base_url")
    @classmethod
    def _check_address(cls, url: str) -> str:
        parts = address_parts(url, form="http://HOST[:PORT]", schemes=("http", "https", "ws", "wss"))
        if parts.query or parts.fragment:
            raise ValueError("should not contain ? or #")
        return url
