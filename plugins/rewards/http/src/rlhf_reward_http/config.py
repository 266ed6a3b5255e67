"""Options of the reward `http`."""

from __future__ import annotations

from pydantic import ConfigDict, Field, field_validator

from rlhf_core.config import Section
from rlhf_web import address_parts


class HttpRewardConfig(Section):
    """Where the scorer is and how patiently it is asked."""

    model_config = ConfigDict(hide_input_in_errors=True)

    url: str = Field(description="Address that samples are posted to, as `rlhf serve-reward` prints it.")
    token_env: str | None = Field(
        None, min_length=1, description="Environment variable that holds the token, sent as `Authorization: Bearer`."
    )
    samples_per_request: int = Field(16, ge=1, description="Answers sent in one request.")
    max_connections: int = Field(8, ge=1, description="Requests in flight at once; connections are used again.")
    connect_seconds: float = Field(5.0, gt=0, description="Deadline of a connection attempt.")
    answer_seconds: float = Field(
        30.0, gt=0, description="Longest silence on a connection before a request counts as lost and is sent again."
    )
    patience_seconds: float = Field(
        45.0,
        ge=0,
        description="How long a request is sent again while the server is busy, away, or loses it. Keep it below the "
        "reward's timeout_seconds, which bounds the whole call.",
    )
    max_response_bytes: int = Field(16 * 2**20, ge=1, description="Largest response that is read.")

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        parts = address_parts(url)
        if parts.username is not None or parts.password is not None:
            raise ValueError("holds credentials, which would be written down: name a variable in token_env instead")
        return url
