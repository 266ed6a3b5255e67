"""Options of the reward `http`."""

from __future__ import annotations

from pydantic import Field, field_validator

from rlhf_web import ClientOptions, address_parts


class HttpRewardConfig(ClientOptions):
    """Options of `http`: the server's address and the client's limits."""

    url: str = Field(description="Address that samples are posted to, as printed by `rlhf serve-reward`.")
    token_env: str | None = Field(
        None, min_length=1, description="Environment variable with the token, sent as `Authorization: Bearer`."
    )
    samples_per_request: int = Field(16, ge=1, description="Number of answers per request.")
    max_response_bytes: int = Field(16 * 2**20, ge=1, description="Maximum size of a response.")

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        address_parts(url, key_option="token_env")
        return url
