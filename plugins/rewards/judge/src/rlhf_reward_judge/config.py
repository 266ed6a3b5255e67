"""Options of the reward `judge`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rlhf_web import ClientOptions, address_parts


class JudgeConfig(ClientOptions):
    """Who judges, by what, and how much that may cost."""

    removed: ClassVar[Mapping[str, str]] = {
        "attempts": "patience_seconds says how long a call is made again",
        "breaker_failures": "remove it: each call is made again for patience_seconds",
        "breaker_seconds": "remove it: each call is made again for patience_seconds",
    }

    rubric: str = Field(min_length=1, description="What makes an answer good, in the words that the judge is given.")
    mode: Literal["rubric", "pairwise"] = Field(
        "rubric",
        description="rubric: each answer gets points, the score is their share of max_points. pairwise: answers to one "
        "prompt are compared, the score is the share of comparisons won, a tie half of one.",
    )
    max_points: int = Field(10, ge=1, le=1000, description="Most points of the rubric; the least is 0.")
    opponents: int | None = Field(
        None, ge=1, description="pairwise: compare each answer with so many others of its group; null is with all."
    )
    url: str | None = Field(
        None,
        description="An OpenAI-compatible server: the address that /chat/completions is appended to, often ending in "
        "/v1. Either this or model_path.",
    )
    model: str | None = Field(None, min_length=1, description="The model's name at that server.")
    key_env: str | None = Field(
        None, min_length=1, description="Environment variable that holds the key, sent as `Authorization: Bearer`."
    )
    model_path: str | None = Field(
        None, min_length=1, description="A local judge: model folder or hub name, with a chat template or without."
    )
    engine: str = Field("hf", min_length=1, description="The engine that a local judge answers by.")
    engine_options: dict[str, Any] = Field(default_factory=dict, description="Its options, as in the section engine.")
    temperature: float = Field(0.0, ge=0, description="Of the judge; 0 is its likeliest verdict.")
    max_reply_tokens: int = Field(512, ge=8, description="Longest reply of the judge, in tokens.")
    asked_again: int = Field(1, ge=0, le=10, description="Times a judge is asked again whose verdict cannot be read.")
    unreadable: Literal["fail", "lowest"] = Field(
        "fail",
        description="A verdict that still cannot be read: an error, for the entry's on_failure to decide on, or the "
        "lowest score (pairwise: a tie).",
    )
    max_calls: int | None = Field(
        None,
        ge=1,
        description="Most calls of the judge in a run, on one machine; then scoring fails. null: any number.",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Most tokens, prompts and replies, in a run on one machine; calls in flight are still paid for.",
    )
    answer_seconds: float = Field(60.0, gt=0, description="Longest silence on a connection before a call is lost.")

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = address_parts(url, key_option="key_env")
        if parts.query or parts.fragment:
            raise ValueError("holds a query, which would be written down: name a variable in key_env instead")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _one_judge(self) -> JudgeConfig:
        if (self.url is None) == (self.model_path is None):
            raise ValueError("give url, for a server, or model_path, for a local judge: one of them")
        if self.url is not None and self.model is None:
            raise ValueError("model is required with url: the name that the server knows the judge by")
        if self.model_path is not None and (self.key_env is not None or self.model is not None):
            raise ValueError("key_env and model are for a server (url), not for a local judge")
        return self
