"""Builds the player of an environment's episodes, inside or outside a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.components import TaskContext
from rlhf_core.config.resolved import Configured
from rlhf_core.protocols import RolloutEngine
from rlhf_core.rollout.player import PlayerContext
from rlhf_core.types import PhaseTimes, SamplingParams

from .attempt import MakeEnvironment
from .contract import make_task
from .episode import Rules
from .isolation.host import IsolatedEnvironments
from .play import EnvironmentPlayer
from .section import EnvironmentConfig
from .shapes import new_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build(context: PlayerContext) -> EnvironmentPlayer:
    """Build the player of the section `environment`.

    Args:
        context: The run's engine, tokenizer, sampling options and seed.

    Returns:
        A player. Close it to end the processes of isolated environments.
    """
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
    """Build the player of an environment's episodes, also outside a run.

    Args:
        environment: The checked section `environment` (`resolve_environment`).
        engine: Samples the policy's turns.
        tokenizer: The policy's tokenizer. Chat prompts and tools require its chat template.
        sampling: Sampling options of all turns.
        seed: The run's seed, from which the tasks' seeds are derived.
        purpose: Purposes such as training and evaluation get different task seeds.
        base_folder: Folder for relative paths in the environment's options. None is the working folder.
        times: Times and token counts to add to. Players of a run share them.

    Returns:
        A player. Close it to end the processes of isolated environments.
    """
    options = environment.typed(EnvironmentConfig)
    name = environment.name.rpartition(":")[2]  # `Game` for `./game.py:Game`
    context = TaskContext(seed, base_folder or Path.cwd())
    environments: MakeEnvironment | IsolatedEnvironments = partial(
        new_environment, partial(environment.build, environment.config, context)
    )
    if options.isolate:
        environments = IsolatedEnvironments(
            environment.recipe(environment.config, context),
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
