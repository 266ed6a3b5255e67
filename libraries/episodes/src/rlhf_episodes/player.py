"""Builds the player of an environment's episodes, inside or outside a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlhf_core.components import RewardContext, TaskContext
from rlhf_core.config.problems import Problems
from rlhf_core.config.resolved import Configured, ResolvedRun
from rlhf_core.config.select import Selector
from rlhf_core.models import model_kind_for
from rlhf_core.place import resolve_device
from rlhf_core.protocols import RolloutEngine
from rlhf_core.rollout.player import PlayerContext
from rlhf_core.types import PhaseTimes, Prompt, SamplingParams

from .answer_options import AnswerStructures
from .attempt import MakeEnvironment
from .contract import make_task
from .isolation.host import IsolatedEnvironments
from .journal.turn_journal import TurnJournal, run_digest
from .leases import lease_key
from .part_rewards import PartRewards
from .play import EnvironmentPlayer
from .playable import Playable
from .rules import Rules
from .section import EnvironmentConfig
from .selected import resolve_environment
from .shapes import new_environment
from .shared import EnvironmentMaker, is_shared
from .sight import SeeingKind, Sight

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build(context: PlayerContext) -> EnvironmentPlayer:
    """Build the player of the section `environment`.

    Args:
        context: The run's engine, tokenizer, sampling options and seed.

    Returns:
        A player. Close it to end the processes of isolated environments.
    """
    model = context.run.run.model
    journal = None
    is_recorded = context.run.sections["environment"].typed(EnvironmentConfig).journal
    if is_recorded and context.purpose != "evaluation" and context.journal.folder is None:
        logger.info("turns are not recorded: the run folder is not on this machine")
    elif is_recorded and context.purpose != "evaluation":
        num_kept = context.run.run.checkpoint.every_episodes or 0
        journal = TurnJournal(context.journal, context.engine, run_digest(context.run), num_kept)
    player = build_environment_player(
        context.run.sections["environment"],
        context.engine,
        context.tokenizer,
        sampling=context.sampling,
        seed=context.seed,
        purpose="evaluation-task" if context.purpose == "evaluation" else "task",
        times=context.times,
        rewards=lambda: RewardContext(str(resolve_device(model.device)), context.seed, model.path),
        sight=_sight(context.run),
    )
    player.journal = journal
    return player


def _sight(run: ResolvedRun) -> Sight | None:
    """Return what reads images in messages, with the bounds and hosts of the prompts' images. None for a text model."""
    kind = model_kind_for(run.run.model)
    if not isinstance(kind, SeeingKind):
        return None
    from rlhf_images import ImageLimits

    limits = getattr(run.prompts.config, "limits", None)
    downloads = getattr(run.prompts.config, "downloads", None)  # of the source `images`
    fetch = downloads() if callable(downloads) else None
    return Sight(kind, limits if isinstance(limits, ImageLimits) else ImageLimits(), Path.cwd(), fetch)


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
    rewards: Callable[[], RewardContext] | None = None,
    sight: Sight | None = None,
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
        rewards: Returns the context in which rewards of several environments are built. None is a CPU.
        sight: Reads images in observations. None if the model does not see.

    Returns:
        A player. Close it to end the processes of isolated environments.
    """
    options = environment.typed(EnvironmentConfig)
    context = TaskContext(seed, base_folder or Path.cwd())
    parts = options.parts()
    make = partial(_playable, engine=engine, tokenizer=tokenizer, sampling=sampling, context=context, sight=sight)
    player = partial(
        EnvironmentPlayer, engine=engine, task=partial(make_task, seed, purpose), times=times or PhaseTimes()
    )
    if not parts:
        return player([make(environment)])
    environments = []
    for label, part in parts.items():
        problems = Problems()
        selected = resolve_environment(part.section, problems)
        judges = Selector(problems).rewards(part.rewards, "rewards", has_player=True)
        problems.raise_if_any(f"environment {label}")
        assert selected is not None
        scorer = None
        if judges:
            scorer = PartRewards(judges, RewardContext("cpu", seed) if rewards is None else rewards())
        environments.append(replace(make(selected, label), weight=part.weight, rewards=scorer))
    assign, labels = assignment(environment, context), list(parts)
    return player(environments, choose=lambda prompt: labels.index(assign(prompt)))


def assignment(environment: Configured, context: TaskContext) -> Callable[[Prompt], str]:
    """Return the function from a prompt to the label of its environment.

    Args:
        environment: An environment with parts (`EnvironmentConfig.parts`).
        context: Seed and folder of the run.
    """
    return cast("Callable[[Prompt], str]", environment.build(environment.config, context))


def _playable(
    environment: Configured,
    label: str | None = None,
    *,
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingParams,
    context: TaskContext,
    sight: Sight | None,
) -> Playable:
    options = environment.typed(EnvironmentConfig)
    name = environment.name.rpartition(":")[2]  # `Game` for `./game.py:Game`
    name = name if label is None else f"{label} ({name})"
    maker = None
    if not options.isolate:
        build = partial(environment.build, environment.config, context)
        key = lease_key(environment.to_mapping(), context.seed, context.base_folder)
        maker = EnvironmentMaker(build, shared=is_shared(environment), key=key)
    environments: MakeEnvironment | IsolatedEnvironments
    if maker is not None:
        environments = partial(new_environment, maker)
    else:
        environments = IsolatedEnvironments(
            environment.recipe(environment.config, context),
            name=name,
            concurrency=options.concurrency,
            memory_limit_bytes=options.memory_limit_bytes,
        )
    rules = Rules(
        options=options,
        tokenizer=tokenizer,
        sampling=sampling,
        context_tokens=engine.context_tokens,
        eos_token_ids=engine.eos_token_ids,
        structures=AnswerStructures(engine, tokenizer),
        columns=environment.columns,
        sight=sight,
    )
    return Playable(make=environments, rules=rules, name=name, label=label, maker=maker)
