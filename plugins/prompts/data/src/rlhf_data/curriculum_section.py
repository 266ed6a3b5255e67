"""The section `prompts.curriculum`, in a file of its own: it is imported with every run file."""

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
    """The changes of a curriculum at one episode."""

    from_episode: int = Field(0, ge=0, description="The first episode of the stage.")
    success: SuccessRange | None = Field(None, description="[lowest, highest] success rate; null: the curriculum's.")
    pools: list[str] | None = Field(None, description="Draw from these pools only; null: from all.")


class CurriculumConfig(Section):
    """Which prompts are drawn, by the success rates of their answers so far. Without it, all are drawn in turn."""

    success: SuccessRange = Field(
        (0.0, 1.0), description="[lowest, highest] success rate of prompts that are drawn; new ones always are."
    )
    success_score: float = Field(1.0, description="Score from which an answer is a success.")
    reward: str | None = Field(None, description="Reward (its label) that is the score; null takes the first.")
    newest_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Weight of a prompt's newest answers in its rate, beside the earlier ones.",
    )
    revisit_after: Count = Field(
        4, description="Times in a row that a prompt outside of `success` is passed over before it is drawn again."
    )
    retire_after: Count | None = Field(
        None, description="Visits in a row with nothing but successes after which a prompt is not drawn again."
    )
    pool: str | None = Field(
        None,
        description="Key of the records that names their pool, such as level, or source in a mixture; a prompt never "
        "sampled has its pool's rate.",
    )
    stages: list[CurriculumStage] = Field(default_factory=list, description="Changes by episode, the last one holds.")

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        if not run.rolls_out:
            yield Problem("", f"{run.algorithm.name} learns from a dataset: there is no answer to judge by")
        elif self.reward is not None and self.reward not in run.reward_weights:
            rewards = list(run.reward_weights)
            near = suggestion(self.reward, rewards)
            yield Problem("reward", f'no reward "{self.reward}" in this run{near} (rewards: {rewards})')

    def sampler(self, records: PromptStream) -> Sampler:
        make = import_module("rlhf_data.curriculum").make_curriculum  # imported when it is used, as a `build`
        return cast("Sampler", make(self, records))

    @model_validator(mode="after")
    def _makes_sense(self) -> CurriculumConfig:
        for low, high in (self.success, *(stage.success for stage in self.stages if stage.success)):
            if low > high:
                raise ValueError(f"success needs lowest <= highest, got {[low, high]}")
        episodes = [stage.from_episode for stage in self.stages]
        if episodes != sorted(episodes):
            raise ValueError("stages should stand in the order of from_episode")
        if self.pool is None and any(stage.pools for stage in self.stages):
            raise ValueError("stages name pools, but there is no `pool`: the key of the records that names theirs")
        return self


curriculum = Component(summary="Draws prompts by the success of their answers so far.", config=CurriculumConfig)
