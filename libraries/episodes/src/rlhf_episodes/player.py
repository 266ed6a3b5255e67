"""Builds the player of an environment's episodes, in a run or outside of one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.components import TaskContext
from rlhf_core.protocols import RolloutEngine
from rlhf_core.rollout.player import PlayerContext
from rlhf_core.types import PhaseTimes, SamplingParams

from .attempt import Make
from .contract import make_task
from .episode import Rules
from .isolation.host import IsolatedEnvironments
from .play import EnvironmentPlayer
from .selected import SelectedEnvironment
from .shapes import new_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build(context: PlayerContext) -> EnvironmentPlayer:
    """The player of the section `environment`."""
    environment = SelectedEnvironment.of_run(context.run)
    assert environment is not None
    return build_environment_player(
        environment,
        context.engine,
        context.tokenizer,
        sampling=context.sampling,
        seed=context.seed,
        purpose="evaluation-task" if context.purpose == "evaluation" else "task",
        times=context.times,
    )


def build_environment_player(
    environment: SelectedEnvironment,
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sampling: SamplingParams,
    seed: int,
    purpose: str = "task",
    base_folder: Path | None = None,
    times: PhaseTimes | None = None,
) -> EnvironmentPlayer:
    """Build the player of an environment's episodes.

    purpose: tasks of different purposes have different seeds. base_folder: of relative paths in its options; None is
    the working folder. times: shared with other players of a run.
    """
    return EnvironmentPlayer(
        _environments(environment, TaskContext(seed, base_folder or Path.cwd())),
        Rules(
            options=environment.options,
            tokenizer=tokenizer,
            sampling=sampling,
            context_tokens=engine.context_tokens,
            eos_token_ids=engine.eos_token_ids,
            columns=environment.columns,
        ),
        name=environment.name,
        engine=engine,
        task=partial(make_task, seed, purpose),
        times=times or PhaseTimes(),
    )


def _environments(environment: SelectedEnvironment, context: TaskContext) -> Make | IsolatedEnvironments:
    """Made in this process, or in a separate one."""
    selected = environment.selected
    if not environment.isolate:
        return partial(new_environment, partial(selected.build, selected.config, context))
    return IsolatedEnvironments(
        selected.recipe(selected.config, context),
        name=environment.name,
        concurrency=environment.options.concurrency,
        memory_limit_bytes=environment.options.memory_limit_bytes,
    )
