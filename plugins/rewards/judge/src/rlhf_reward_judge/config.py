"""Options of the reward `judge`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rlhf_web import ClientOptions, address_parts


class JudgeConfig(ClientOptions):
    """Options of `judge`: the judging model, the rubric and the budget."""

    removed: ClassVar[Mapping[str, str]] = {
        "attempts": "patience_seconds sets how long a call is repeated",
        "breaker_failures": "remove it: each call is repeated for patience_seconds",
        "breaker_seconds": "remove it: each call is repeated for patience_seconds",
    }

    rubric: str = Field(min_length=1, description="Description of a good answer, sent to the judge as written.")
    mode: Literal["rubric", "pairwise"] = Field(
        "rubric",
        description="rubric: each answer gets points, and the score is their share of max_points. pairwise: answers to "
        "one prompt are compared, and the score is the share of comparisons won, with a tie as half.",
    )
    max_points: int = Field(10, ge=1, le=1000, description="Maximum points of the rubric. The minimum is 0.")
    opponents: int | None = Field(
        None, ge=1, description="pairwise: number of answers of its group that each answer is compared with. null: all."
    )
    url: str | None = Field(
        None,
        description="An OpenAI-compatible server: the address that /chat/completions is appended to, often ending in "
        "/v1. Either this or model_path.",
    )
    model: str | None = Field(None, min_length=1, description="Name of the model at that server.")
    key_env: str | None = Field(
        None, min_length=1, description="Environment variable with the key, sent as `Authorization: Bearer`."
    )
    model_path: str | None = Field(
        None, min_length=1, description="A local judge: model folder or hub name, with or without a chat template."
    )
    engine: str = Field("hf", min_length=1, description="Engine of a local judge.")
    engine_options: dict[str, Any] = Field(default_factory=dict, description="Its options, as in the section engine.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature of the judge. 0 is greedy.")
    max_reply_tokens: int = Field(512, ge=8, description="Maximum length of the judge's reply in tokens.")
    asked_again: int = Field(1, ge=0, le=10, description="Number of retries if a verdict cannot be read.")
    unreadable: Literal["fail", "lowest"] = Field(
        "fail",
        description="Result if a verdict still cannot be read. fail: an error, handled by the entry's on_failure. "
        "lowest: the lowest score (pairwise: a tie).",
    )
    max_calls: int | None = Field(
        None,
        ge=1,
        description="Maximum number of calls in a run on one machine, after which scoring fails. null: unlimited.",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum tokens (prompts and replies) in a run on one machine. Calls in flight are still paid for.",
    )
    answer_seconds: float = Field(60.0, gt=0, description="Maximum silence on a connection before a call is lost.")

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = address_parts(url, key_option="key_env")
        if parts.query or parts.fragment:
            raise ValueError("contains a query, which would be written to files: name a variable in key_env instead")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _one_judge(self) -> JudgeConfig:
        if (self.url is None) == (self.model_path is None):
            raise ValueError("set exactly one of them: url for a server, or model_path for a local judge")
        if self.url is not None and self.model is None:
            raise ValueError("model is required with url: the judge's name at the server")
        if self.model_path is not None and (self.key_env is not None or self.model is not None):
            raise ValueError("key_env and model are for a server (url), not for a local judge")
        return self
