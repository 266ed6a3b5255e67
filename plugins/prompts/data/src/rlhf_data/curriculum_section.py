"""The section `prompts.curriculum`, in its own file, because it is imported with every run file."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, cast

from pydantic import Field, model_validator

from rlhf_core import Component, Section
from rlhf_core.config import Problem
from rlhf_core.util import suggestion

if TYPE_CHECKING:
    from rlhf_core.config import ResolvedRun
    from rlhf_core.prompts import PromptStream
    from rlhf_core.protocols import Sampler

Count = Annotated[int, Field(ge=1)]
SuccessRange = tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0, le=1)]]


class CurriculumStage(Section):
    """Changes of a curriculum from one episode on."""

    from_episode: int = Field(0, ge=0, description="First episode of the stage.")
    success: SuccessRange | None = Field(None, description="[lowest, highest] success rate. null is the curriculum's.")
    pools: list[str] | None = Field(None, description="Pools to draw from. null is all pools.")


class CurriculumConfig(Section):
    """Select prompts by the success rates of their answers so far. Without it, all are drawn in turn."""

    success: SuccessRange = Field(
        (0.0, 1.0), description="[lowest, highest] success rate of prompts to draw. New prompts are always drawn."
    )
    success_score: float = Field(1.0, description="Minimum score of a successful answer.")
    reward: str | None = Field(None, description="Label of the reward used as the score. null is the first.")
    newest_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Weight of a prompt's newest answers in its success rate (moving average).",
    )
    revisit_after: Count = Field(
        4, description="Number of consecutive skips after which a prompt outside of `success` is drawn again."
    )
    retire_after: Count | None = Field(
        None, description="Number of consecutive visits with only successes after which a prompt is retired."
    )
    pool: str | None = Field(
        None,
        description="Key of the records that contains their pool, such as level, or source in a mixture. A prompt "
        "that was never sampled uses its pool's rate.",
    )
    stages: list[CurriculumStage] = Field(default_factory=list, description="Changes by episode. The latest applies.")

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        if not run.rolls_out:
            yield Problem("", f"{run.algorithm.name} learns from a dataset, without answers to judge")
        elif self.reward is not None and self.reward not in run.reward_weights:
            rewards = list(run.reward_weights)
            near = suggestion(self.reward, rewards)
            yield Problem("reward", f'this run does not have the reward "{self.reward}"{near} (rewards: {rewards})')

    def sampler(self, records: PromptStream) -> Sampler:
        make = import_module("rlhf_data.curriculum").make_curriculum  # imported on use, like a `build`
        return cast("Sampler", make(self, records))

    @model_validator(mode="after")
    def _makes_sense(self) -> CurriculumConfig:
        for low, high in (self.success, *(stage.success for stage in self.stages if stage.success)):
            if low > high:
                raise ValueError(f"success requires lowest <= highest, got {[low, high]}")
        episodes = [stage.from_episode for stage in self.stages]
        if episodes != sorted(episodes):
            raise ValueError("stages must be sorted by from_episode")
        if self.pool is None and any(stage.pools for stage in self.stages):
            raise ValueError("stages with pools require `pool`, the key of the records that contains their pool")
        return self


curriculum = Component(summary="Selects prompts by the success rates of their answers so far.", config=CurriculumConfig)
