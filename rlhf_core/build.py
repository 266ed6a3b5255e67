"""From a resolved run to its parts: strategy, algorithm, models, engine, rewards, prompts.

Every transport builds with these functions, whichever process a part ends up in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .algorithm import Algorithm, RolloutAlgorithm
from .components import EngineContext, EnvironmentContext
from .config.resolve import ResolvedRun
from .config.resolved import Configured, SelectedEnvironment, SelectedReward
from .config.sections import PromptsConfig, TrainConfig
from .contexts import (
    algorithm_context,
    environment_context,
    prompts_context,
    reward_context,
    strategy_context,
)
from .environments.attempt import Make
from .environments.contract import make_task
from .environments.episode import Rules
from .environments.isolation.host import IsolatedEnvironments
from .environments.play import EnvironmentPlayer
from .environments.shapes import new_environment
from .models.batched_forward import Reference
from .models.frozen import place_frozen
from .models.loading import adapter_off, disable_dropout, is_lora, load_policy
from .models.passes import GroupPasses, PassModels
from .models.training_noise import disable_training_noise
from .optimizers.making import make_optimizer, make_scheduler
from .plugins.discovery import resolve_build
from .plugins.functions import function_of_file
from .plugins.recipe import Recipe
from .prompts.curriculum import Curriculum, make_curriculum
from .prompts.records import Check
from .prompts.stream import PromptStream
from .protocols import RolloutEngine
from .rewards.scorer import RewardScorer, reward_spec
from .rollout.evaluate import EvaluatedSet, PolicyEvaluator, at_temperature
from .rollout.maker import Player
from .rollout.samples import check_columns
from .rollout.single_answer import SingleAnswers
from .strategy import Strategy, Trained
from .types import Role, SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase


def build_strategy(resolved: ResolvedRun) -> Strategy:
    """The strategy of the run; its process group is not joined yet."""
    build = resolve_build(resolved.strategy)
    return cast(Strategy, build(resolved.strategy.config, strategy_context(resolved.run.model.device)))


def build_algorithm(resolved: ResolvedRun, tokenizer: PreTrainedTokenizerBase) -> Algorithm[Any, Any]:
    """The algorithm, told how rollouts are sampled."""
    context = algorithm_context(
        tokenizer,
        sampling=resolved.sampling,
        samples_per_prompt=resolved.run.train.samples_per_prompt,
        weights=resolved.reward_weights,
        clip=resolved.run.reward_scaling.clip,
    )
    return cast("Algorithm[Any, Any]", resolve_build(resolved.algorithm)(resolved.algorithm.config, context))


def build_engine(
    resolved: ResolvedRun, model: nn.Module, tokenizer: PreTrainedTokenizerBase, strategy: Strategy
) -> RolloutEngine:
    """The engine over `model`: the trained module itself, or a copy of its own."""
    context = EngineContext(
        model,
        tokenizer,
        device=strategy.device,
        seed=resolved.run.train.seed,
        model_path=resolved.run.model.path,
        compute_dtype=strategy.compute_dtype,
        in_flight=resolved.updates_in_flight,
    )
    return cast(RolloutEngine, resolve_build(resolved.engine)(resolved.engine.config, context))


def build_scorer(
    resolved: ResolvedRun,
    device: torch.device,
    *,
    cache_folder: Path | None = None,
    rewards: Sequence[SelectedReward] | None = None,
) -> RewardScorer:
    """All rewards of the run, or `rewards`, behind the one policy; `device` is that of the process they run in.

    cache_folder: None where there is nowhere to remember scores.
    """
    run = resolved.run
    context = reward_context(device, seed=run.train.seed, model_path=run.model.path, folder=cache_folder)
    specs = [
        reward_spec(
            r.selected,
            r.config,
            context,
            r.call_options if cache_folder is not None else r.call_options.without_cache(),
            name=r.name,
            weight=r.weight,
        )
        for r in (resolved.rewards if rewards is None else rewards)
    ]
    # Whether there have to be some, `resolve` has checked.
    return RewardScorer(specs, cache_folder=cache_folder, may_be_empty=True)


def build_prompts(
    resolved: ResolvedRun,
    tokenizer: PreTrainedTokenizerBase,
    *,
    held_out: int,
    source: Configured | None = None,
    check: Check | None = None,
    measured: int | None = None,
) -> PromptStream:
    """The endless stream of prompts of the run's source (or of another), with `held_out` records kept apart.

    check: asked of every record (see `PromptStream`). measured: records whose length is looked at; None: all.
    """
    selected = source or resolved.prompts
    limits = selected.config if isinstance(selected.config, PromptsConfig) else resolved.run.prompts
    context = prompts_context(seed=resolved.run.train.seed, tokenizer=tokenizer)
    return PromptStream(
        resolve_build(selected)(selected.config, context),
        tokenizer,
        seed=resolved.run.train.seed,
        max_prompt_tokens=limits.max_prompt_tokens,
        too_long=limits.too_long,
        held_out=held_out,
        may_be_empty=resolved.environment is not None,
        skip_duplicates=limits.duplicates == "skip",
        keep=None if limits.filter is None else function_of_file(limits.filter, Path(), "prompts.filter"),
        check=check,
        measured=measured,
    )


def build_run_prompts(
    resolved: ResolvedRun,
    tokenizer: PreTrainedTokenizerBase,
    *,
    check: Check | None = None,
    measured: int | None = None,
) -> PromptStream:
    """The prompts a run trains on; those it evaluates on are held out, unless they have a source of their own."""
    holds_out = resolved.run.eval is not None and resolved.eval_prompts is None
    held_out = resolved.run.eval.num_prompts if resolved.run.eval is not None and holds_out else 0
    return build_prompts(resolved, tokenizer, held_out=held_out, check=check, measured=measured)


def build_curriculum(resolved: ResolvedRun, prompts: PromptStream) -> Curriculum | None:
    """The curriculum that draws the run's prompts; None where all are drawn in turn."""
    options = resolved.section("prompts.curriculum")
    return None if options is None else make_curriculum(options, prompts.records)


def build_player(
    resolved: ResolvedRun,
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    evaluates: SamplingParams | None = None,
    greedy: bool = False,
) -> Player:
    """The player by which the policy answers the run's prompts: once, or in the turns of its environment.

    evaluates: how the answers of an evaluation are sampled, whose tasks have seeds of their own. greedy: answer the
    tasks that are trained on without sampling.
    """
    sampling = evaluates or (at_temperature(resolved.sampling, 0) if greedy else resolved.sampling)
    environment = resolved.environment
    if environment is None:
        return SingleAnswers(engine, tokenizer, sampling)
    seed, purpose = resolved.run.train.seed, "evaluation-task" if evaluates else "task"
    return build_environment_player(environment, engine, tokenizer, sampling=sampling, seed=seed, purpose=purpose)


def build_environment_player(
    environment: SelectedEnvironment,
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sampling: SamplingParams,
    seed: int,
    purpose: str = "task",
    base_folder: Path | None = None,
) -> EnvironmentPlayer:
    """The player of an environment's episodes, in a run or outside of one.

    purpose: tasks of different purposes have different seeds. base_folder: of relative paths in its options; None is
    the working folder.
    """
    return EnvironmentPlayer(
        _environments(environment, environment_context(seed=seed, base_folder=base_folder)),
        Rules(
            options=environment.options,
            tokenizer=tokenizer,
            sampling=sampling,
            context_tokens=engine.context_tokens,
            eos_token_ids=engine.eos_token_ids,
        ),
        name=environment.name,
        engine=engine,
        task=partial(make_task, seed, purpose),
    )


def _environments(environment: SelectedEnvironment, context: EnvironmentContext) -> Make | IsolatedEnvironments:
    """Made in this process, or in one of their own."""
    selected = environment.selected
    if not environment.isolate:
        return partial(new_environment, partial(resolve_build(selected), selected.config, context))
    return IsolatedEnvironments(
        Recipe.of("environments", selected, selected.config, context),
        name=environment.name,
        concurrency=environment.options.concurrency,
        memory_limit_bytes=environment.options.memory_limit_bytes,
    )


def build_eval_prompts(
    resolved: ResolvedRun, tokenizer: PreTrainedTokenizerBase, check: Check | None = None, measured: int | None = None
) -> dict[str | None, PromptStream]:
    """The prompts of each evaluation set that has its own source, by name. check: of records that are measured."""
    sources = {each.name: each.prompts for each in resolved.eval_sets}
    own = {} if resolved.eval_prompts is None else {None: resolved.eval_prompts}
    asked: dict[str | None, Check | None] = {None: check if resolved.measures_eval_records else None}
    return {
        name: build_prompts(resolved, tokenizer, held_out=0, source=source, check=asked.get(name), measured=measured)
        for name, source in (own | sources).items()
    }


def build_evaluator(
    resolved: ResolvedRun,
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    scorer: RewardScorer,
    prompts: PromptStream,
    strategy: Strategy,
    eval_prompts: Mapping[str | None, PromptStream] | None = None,
) -> PolicyEvaluator:
    """The evaluator that scores the policy on held-out prompts, or on the first ones of sources of their own.

    eval_prompts: of those sources (`build_eval_prompts`), where they are built already.
    """
    assert resolved.run.eval is not None
    streams = build_eval_prompts(resolved, tokenizer) if eval_prompts is None else eval_prompts
    rewards: dict[str | None, Any] = {each.name: each.rewards for each in resolved.eval_sets}
    sets = []
    for name, options in resolved.evaluation_sets:
        own = rewards.get(name)
        stream = streams.get(name)
        sets.append(
            EvaluatedSet(
                player=lambda sampling: build_player(resolved, engine, tokenizer, evaluates=sampling),
                scorer=scorer if own is None else build_scorer(resolved, strategy.device, rewards=own),
                owns_scorer=own is not None,
                prompts=(prompts.evaluation_prompts() if stream is None else stream.first_prompts(options.num_prompts)),
                sampling=resolved.sampling,
                options=options,
                name=name,
            )
        )
    return PolicyEvaluator(sets, batch_size=resolved.run.eval.batch_size, strategy=strategy)


@dataclass(frozen=True, slots=True)
class TrainerModels:
    """The models of a trainer process."""

    tokenizer: PreTrainedTokenizerBase
    trained: dict[str, Trained]
    """Role -> prepared model, optimizer and schedule."""

    @property
    def policy(self) -> nn.Module:
        return self.trained["policy"].model


def model_dtype(resolved: ResolvedRun, strategy: Strategy) -> torch.dtype:
    """`model.dtype`, where `auto` is what the strategy holds its parameters in."""
    import torch

    name = resolved.run.model.dtype
    return strategy.parameter_dtype if name == "auto" else cast("torch.dtype", getattr(torch, name))


def build_trained_models(
    resolved: ResolvedRun,
    algorithm: Algorithm[Any, Any],
    strategy: Strategy,
    tokenizer: PreTrainedTokenizerBase,
) -> TrainerModels:
    """Load policy and, where the algorithm has one, critic; make optimizers and schedules; prepare."""
    run = resolved.run
    with strategy.model_init_context():
        policy = load_policy(
            run.model,
            dtype=model_dtype(resolved, strategy),
            seed=run.train.seed,
            tokenizer=tokenizer,
            kind=algorithm.model_kind,
        )
        disable_training_noise(policy)
        models: dict[str, nn.Module] = {"policy": policy}
        if "critic" in algorithm.roles:
            models["critic"] = algorithm.build_critic(policy)
        if isinstance(algorithm, RolloutAlgorithm):  # the adapters' too: a ratio compares one function with itself
            for model in models.values():
                disable_dropout(model)
    trained = {role: _prepare(resolved, role, model, strategy) for role, model in models.items()}
    return TrainerModels(tokenizer, trained)


def _prepare(resolved: ResolvedRun, role: str, model: nn.Module, strategy: Strategy) -> Trained:
    model.train()
    options, train = resolved.run.optimizer, resolved.run.train
    optimizer = make_optimizer(resolved, role, model, strategy)
    per_episode = updates_per_episode(train)
    scheduler = make_scheduler(
        optimizer,
        resolved.schedule,
        warmup_updates=options.warmup_episodes * per_episode,
        total_updates=train.episodes * per_episode,
    )
    return strategy.prepare(model, optimizer, scheduler, max_grad_norm=options.max_grad_norm)


def updates_per_episode(train: TrainConfig) -> int:
    """Optimizer steps of an episode in which no sample is dropped."""
    return train.epochs_per_episode * math.ceil(train.samples_per_episode / train.train_batch_size)


def build_reference(
    resolved: ResolvedRun, algorithm: Algorithm[Any, Any], strategy: Strategy, policy: nn.Module
) -> Reference | None:
    """None where the algorithm needs none; with LoRA the policy with its adapter off; else a frozen copy."""
    if "reference" not in algorithm.roles:
        return None
    inner = strategy.unwrap(policy)
    if is_lora(inner):
        return Reference(policy, partial(adapter_off, inner))
    run = resolved.run
    with strategy.model_init_context():
        model = load_policy(run.model, dtype=model_dtype(resolved, strategy), seed=run.train.seed)
    return Reference(strategy.prepare_inference(model), nullcontext)


def offloads_reference(resolved: ResolvedRun, strategy: Strategy) -> bool:
    """Whether a whole reference of its own leaves the device between its passes. The policy, under LoRA, must not."""
    options = resolved.run.model
    return options.offload_reference and options.lora is None and not strategy.shards_parameters


def build_passes(
    resolved: ResolvedRun, algorithm: RolloutAlgorithm, strategy: Strategy, trained: Mapping[Role, nn.Module]
) -> GroupPasses:
    """The algorithm's passes over finished samples. trained: policy and critic, as they are here."""
    run, policy = resolved.run, trained["policy"]
    models = dict(trained)
    around, offloaded = {}, set()
    if (reference := build_reference(resolved, algorithm, strategy, policy)) is not None:
        models["reference"], around["reference"] = reference.model, reference.context
        if offloads_reference(resolved, strategy):
            offloaded.add("reference")
    dtype = model_dtype(resolved, strategy)
    for role, frozen in algorithm.frozen_models.items():
        models[role] = place_frozen(role, frozen, strategy, dtype=dtype, seed=run.train.seed)
        if frozen.offload and not strategy.shards_parameters:
            offloaded.add(role)
    context = PassModels(
        strategy,
        models,
        temperature=resolved.sampling.temperature,
        batch_tokens=run.train.micro_batch_tokens,
        around=around,
        offloaded=offloaded,
    )
    check_columns(resolved, algorithm, passes := algorithm.passes(context))
    return GroupPasses(strategy, passes)
