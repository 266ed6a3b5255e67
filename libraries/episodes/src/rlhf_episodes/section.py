"""The section `environment` of a run file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

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


TURN_NUMBER = "turn_number"
"""Column per token: number of the token's turn in its sample, in the order of sampling, -1 if it was not sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentPart:
    """One of several environments that a run plays (`EnvironmentConfig.parts`)."""

    section: Mapping[str, Any]
    """Its name and options, as in a section `environment`."""
    weight: float = 1.0
    """Factor of its reward."""
    rewards: Sequence[Mapping[str, Any]] = ()
    """Rewards that are part of its reward, as in the list `rewards` of a run file."""


class EnvironmentConfig(Section):
    """Options for playing the episodes of any environment."""

    selects: ClassVar[str] = "environments"
    needs_no_prompts: ClassVar[bool] = True
    columns: ClassVar[Mapping[str, Column]] = {
        **EPISODE_COLUMNS,
        TURN_NUMBER: Column(dtype="int32", fill=-1, optional=True),
    }

    max_turns: Count = Field(8, description="Maximum number of policy turns in an episode.")
    max_tokens: Count | None = Field(
        None,
        description="Maximum number of response tokens of an episode over all branches, observations included. If the "
        "environment has `compact`, the limit of each branch: before a whole turn no longer fits, the conversation is "
        "shortened and continues in a new branch. null limits each branch by the model's context only.",
    )
    weight: float = Field(1.0, description="Factor of the environment's reward in the combined score.")
    history: Literal["append", "branch"] = Field(
        "append",
        description="Handling of chat templates that render earlier turns differently than sampled (for example, "
        "without thinking): keep them as sampled (append), or train each turn as its own branch (branch).",
    )
    tool_format: str = Field(
        "auto", min_length=1, description="Format of tool calls. auto uses that of the model's chat template."
    )
    concurrency: Count = Field(64, description="Maximum number of episodes that each engine plays at once.")
    timeout_seconds: float = Field(
        60.0,
        gt=0,
        description="Deadline of each reset, step and tool call in seconds, without the policy's time.",
    )
    retries: int = Field(0, ge=0, description="Maximum retries of a failed episode, from the same seeds.")
    on_failure: Literal["fail", "zero", "drop"] = Field(
        "fail", description="Handling of an episode that fails every attempt: end the run, score it 0, or drop it."
    )
    isolate: bool | None = Field(
        None,
        description="Run the environment in a child process that is killed at a deadline. null uses the environment's "
        "default: true for `tools`, false for most others.",
    )
    memory_limit_bytes: Count | None = Field(
        None, description="With isolate: resident memory limit. null is half of the machine's (or container's) memory."
    )

    journal: bool = Field(
        True,
        description="Record finished turns and episodes in the run folder, so that a resume continues from them "
        "instead of sampling them again. Those that no resume needs are deleted.",
    )

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        if not run.rolls_out:
            yield Problem("", f"{run.algorithm.name} learns from a dataset and does not play episodes")

    def reward_weight(self) -> float:
        return self.weight

    def with_plugin(self, plugin: SelectedPlugin) -> Self:
        if isinstance(plugin.function, type):
            check_shape(plugin.function, plugin.label)
        return self if self.isolate is not None else self.model_copy(update={"isolate": plugin.component.isolate})

    def parts(self) -> Mapping[str, EnvironmentPart]:
        """Return the environments that a run with these options plays, by label. Empty: only the selected one.

        The `build` of an environment with parts returns a function from a prompt to the label of its environment.
        """
        return {}

    def for_one_turn(self) -> Self:
        """Return the options with one turn per episode, for a rehearsal."""
        return self.model_copy(update={"max_turns": 1})

    def player(self, context: PlayerContext) -> Player:
        build = import_module("rlhf_episodes.player").build  # imported on use, like a component's `build`
        return cast("Player", build(context))

    def check_inputs(self, inputs: RunInputs) -> None:
        from .chat import chat_format

        chat_format(inputs.tokenizer, tool_format=self.tool_format, history=self.history)

    def rehearse(self, inputs: RunInputs) -> None:
        import_module("rlhf_episodes.rehearsal").play_one_turn(inputs, self)


environment = Component(summary="Multi-turn episodes in an environment.", config=EnvironmentConfig, build="")
