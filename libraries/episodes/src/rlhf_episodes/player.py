"""Builds the player of an environment's episodes, in a run or outside of one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.components import TaskContext
from rlhf_core.config.resolved import Configured
from rlhf_core.protocols import RolloutEngine
from rlhf_core.rollout.player import PlayerContext
from rlhf_core.types import PhaseTimes, SamplingParams

from .attempt import Make
from .contract import make_task
from .episode import Rules
from .isolation.host import IsolatedEnvironments
from .play import EnvironmentPlayer
from .section import EnvironmentConfig
from .shapes import new_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build(context: PlayerContext) -> EnvironmentPlayer:
    """The player of the section `environment`."""
    return build_environment_player(
        context.run.sections["environment"],
        context.engine,
        context.tokenizer,
        sampling=context.sampling,
        seed=context.seed,
        purpose="evaluation-task" if context.purpose == "evaluation" else "task",
        times=context.times,
    )


def build_environment_player(
    environment: Configured,
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sampling: SamplingParams,
    seed: int,
    purpose: str = "task",
    base_folder: Path | None = None,
    times: PhaseTimes | None = None,
) -> EnvironmentPlayer:
    """Build the player of an environment's episodes; it has the options of the section `environment`, too.

    purpose: tasks of different purposes have different seeds. base_folder: of relative paths in its options; None is
    the working folder. times: shared with other players of a run.
    """
    options = environment.typed(EnvironmentConfig)
    name = environment.name.rpartition(":")[2]  # `./game.py:Game` is called Game
    made = TaskContext(seed, base_folder or Path.cwd())
    environments: Make | IsolatedEnvironments = partial(
        new_environment, partial(environment.build, environment.config, made)
    )
    if options.isolate:
        environments = IsolatedEnvironments(
            environment.recipe(environment.config, made),
            name=name,
            concurrency=options.concurrency,
            memory_limit_bytes=options.memory_limit_bytes,
        )
    return EnvironmentPlayer(
        environments,
        Rules(
            options=options,
            tokenizer=tokenizer,
            sampling=sampling,
            context_tokens=engine.context_tokens,
            eos_token_ids=engine.eos_token_ids,
            columns=environment.columns,
        ),
        name=name,
        engine=engine,
        task=partial(make_task, seed, purpose),
        times=times or PhaseTimes(),
    )
