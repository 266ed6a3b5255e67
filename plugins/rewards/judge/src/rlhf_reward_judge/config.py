"""Options of the reward `judge`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from rlhf_web import ChatModelOptions


class JudgeConfig(ChatModelOptions):
    """Options of `judge`: the judging model, the rubric and the budget."""

    called: ClassVar[str] = "judge"
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
    model_path: str | None = Field(
        None, min_length=1, description="A local judge: model folder or hub name, with or without a chat template."
    )
    images: bool = Field(
        False,
        description="Whether the judge sees the images of prompts, reduced to 1024 pixels: as parts `image_url` of the "
        "message, or as images of a local model that sees.",
    )
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
