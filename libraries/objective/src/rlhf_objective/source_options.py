"""Options of the sources of loss other than the policy gradient."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config import Section


class ImitationConfig(Section):
    """Cross-entropy on selected answers (rejection sampling: Dong 2023, RAFT. Expert iteration: Anthony 2017)."""

    coef: float = Field(1.0, gt=0, description="Coefficient of the cross-entropy.")
    best: int | None = Field(
        1, ge=1, description="Imitate at most this many answers to each prompt, those with the highest scores."
    )
    min_score: float | None = Field(
        None, description="Imitate only answers with at least this score. null: those above the prompt's lowest score."
    )

    @model_validator(mode="after")
    def _selects(self) -> ImitationConfig:
        if self.best is None and self.min_score is None:
            raise ValueError("imitates all answers, good and bad: set best or min_score")
        return self


class PreferenceConfig(Section):
    """Online DPO (Guo 2024): the best and the worst answer to each prompt are a preference pair."""

    coef: float = Field(1.0, gt=0, description="Coefficient of the preference loss.")
    beta: float = Field(0.1, gt=0, description="Strength of the regularization toward the reference.")
    loss: Literal["sigmoid", "ipo", "hinge"] = Field(
        "sigmoid", description="Loss on the log-ratios of both answers to the reference."
    )
    min_gap: float = Field(0.0, ge=0, description="Minimum difference of the scores of a pair.")


class RecordsConfig(Section):
    """Cross-entropy on the texts of a file, one for each answer in an update."""

    path: str = Field(
        min_length=1, description="JSON Lines file. A line has `text`, or `prompt` and `completion`, which is learned."
    )
    coef: float = Field(1.0, gt=0, description="Coefficient of the cross-entropy.")
    max_tokens: int = Field(512, ge=2, description="Maximum tokens per text. The rest is cut off.")
