"""The section `environment` of a run file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, Literal, Self, cast

from pydantic import Field

from rlhf_core.columns import Column
from rlhf_core.components import Component
from rlhf_core.config.problems import Problem
from rlhf_core.config.section import Count, Section
from rlhf_core.rollout.episode_metrics import EPISODE_COLUMNS

from .environment_shape import check_shape

if TYPE_CHECKING:
    from rlhf_core.config.resolved import ResolvedRun
    from rlhf_core.plugins.selected import SelectedPlugin
    from rlhf_core.rollout.player import Player, PlayerContext
    from rlhf_core.wiring.inputs import RunInputs


class EnvironmentConfig(Section):
    """How core plays the episodes of an environment, whoever wrote it."""

    selects: ClassVar[str] = "environments"
    needs_no_prompts: ClassVar[bool] = True
    columns: ClassVar[Mapping[str, Column]] = EPISODE_COLUMNS

    max_turns: Count = Field(8, description="Most turns of the policy in an episode.")
    max_tokens: Count | None = Field(
        None,
        description="Most response tokens of an episode, observations included, all branches together; null is what "
        "the model has room for in each.",
    )
    weight: float = Field(1.0, description="Factor of the environment's reward in the combined score.")
    history: Literal["append", "branch"] = Field(
        "append",
        description="Where the chat template writes earlier turns otherwise than they were sampled (thinking that is "
        "cut): keep them as sampled, or train each turn as a branch of its own.",
    )
    tool_format: str = Field(
        "auto", min_length=1, description="How tool calls are written; auto is as the model's chat template does."
    )
    concurrency: Count = Field(64, description="Episodes played at once, by each engine.")
    timeout_seconds: float = Field(
        60.0,
        gt=0,
        description="Deadline of each reset, step and tool call, in seconds; the policy's time is not counted.",
    )
    retries: int = Field(0, ge=0, description="Times an episode that failed is played again from its seeds.")
    on_failure: Literal["fail", "zero", "drop"] = Field(
        "fail", description="An episode that still fails: end the run, score it 0, or leave it out."
    )
    isolate: bool | None = Field(
        None,
        description="Keep the environment in a process of its own, which a deadline can end; null leaves it to the "
        "environment: true for `tools`, false for most.",
    )
    memory_limit_bytes: Count | None = Field(
        None, description="With isolate: resident memory at which its process is ended; null is half of what there is."
    )

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        if not run.rolls_out:
            yield Problem("", f"{run.algorithm.name} learns from a dataset, not from what is played")

    def reward_weight(self) -> float:
        return self.weight

    def with_plugin(self, plugin: SelectedPlugin) -> Self:
        if isinstance(plugin.function, type):
            check_shape(plugin.function, plugin.label)
        return self if self.isolate is not None else self.model_copy(update={"isolate": plugin.component.isolate})

    def player(self, context: PlayerContext) -> Player:
        build = import_module("rlhf_episodes.player").build  # imported when it is used, as a component's `build`
        return cast("Player", build(context))

    def check_inputs(self, inputs: RunInputs) -> None:
        from .chat import chat_format

        chat_format(inputs.tokenizer, tool_format=self.tool_format, history=self.history)

    def rehearse(self, inputs: RunInputs) -> None:
        import_module("rlhf_episodes.rehearsal").play_one_turn(inputs, self)


environment = Component(summary="Episodes of several turns, in an environment.", config=EnvironmentConfig, build="")
