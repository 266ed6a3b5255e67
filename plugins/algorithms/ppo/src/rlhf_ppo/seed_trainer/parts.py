"""Build the core components of a `PPOTrainer` fit from the trainer's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from rlhf_core.components import EngineContext
from rlhf_core.hooks import HookRelay
from rlhf_core.models import GroupPasses
from rlhf_core.plugins import load
from rlhf_core.protocols import RolloutEngine
from rlhf_core.rewards import RewardCombiner, RewardScorer
from rlhf_core.rollout import PolicyExperienceMaker, SingleTurnPlayer, build_colocated_engine
from rlhf_core.strategy import Strategy, TrainedModel
from rlhf_core.training import BatchPlan, EpisodeEstimator, Updater
from rlhf_core.util import permutation
from rlhf_models import is_lora
from rlhf_seed import NeuralReward, seed_reward

from ..algorithm import PPO
from .setup import Batching, Models, Rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerContext:
    """Objects with the lifetime of the trainer."""

    models: Models
    batching: Batching
    rollouts: Rollouts
    tokenizer: PreTrainedTokenizerBase
    trained: dict[str, TrainedModel]
    strategy: Strategy
    algorithm: PPO
    hooks: HookRelay


class SeedMaker(PolicyExperienceMaker):
    """Experience maker with the attribute that subclasses of ColossalChat's trainer read."""

    tokenizer: PreTrainedTokenizerBase
    """The policy's tokenizer."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Components that make experience, closed by the fit's exit stack."""

    maker: SeedMaker
    publish: Callable[[int], None]
    scorer: RewardScorer
    neural_reward: NeuralReward | None

    def release_inference_models(self) -> None:
        """With `offload_inference_models`, move the neural reward off the device before training."""
        if self.neural_reward is not None:
            self.neural_reward.release()


def build_updater(context: TrainerContext) -> Updater:
    """Build an updater that makes one optimizer step from all given samples, in micro-batches of `train_batch_size`."""
    size = context.batching.train_batch_size
    return Updater(context.algorithm, context.strategy, context.trained, micro_batch_size=size)


def build_generation(context: TrainerContext, stack: ExitStack) -> Generation:
    """Build engine, rewards, reference and experience maker. `stack` closes them."""
    rollouts, strategy = context.rollouts, context.strategy
    engine, publish = _engine(context)
    stack.callback(engine.close)
    offload = rollouts.offload_inference_models
    reward = seed_reward(
        context.models.reward,
        strategy.device,
        offload=offload,
        seed=rollouts.seed,
        where="PPOTrainer.reward_model",
    )
    scorer = RewardScorer([reward])
    stack.callback(scorer.close)
    maker = SeedMaker(
        player=SingleTurnPlayer(engine, context.tokenizer, rollouts.sampling),
        samples_per_prompt=rollouts.samples_per_prompt,
        scorer=scorer,
        hooks=context.hooks,
        passes=_passes(context),
    )
    maker.tokenizer = context.tokenizer
    neural_reward = reward.function if isinstance(reward.function, NeuralReward) else None
    return Generation(maker, publish, scorer, neural_reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomBatches(BatchPlan):
    """`sample_buffer`: an update step draws one random batch from the buffer instead of a full pass."""

    seed: int
    mixes_ranks: ClassVar[bool] = True

    def passes(self, samples: Sequence[Sequence[Any]]) -> Iterator[list[Sequence[int]]]:
        for step in range(self.epochs_per_episode):
            # Sample ids are unique in a run, so the first id identifies the episode.
            order = permutation(len(samples), self.seed, "sample-buffer", samples[0][0].sample_id, step)
            yield [order[: self.train_batch_size]]


def build_estimates(context: TrainerContext, generation: Generation, num_update_steps: int) -> EpisodeEstimator:
    """Build the estimator of an episode's advantages, with batches as set by the trainer's arguments."""
    batching, strategy = context.batching, context.strategy
    size = batching.train_batch_size * strategy.world_size
    plan = BatchPlan(size, num_update_steps, strategy.rank, strategy.world_size)
    if batching.sample_buffer:
        plan = RandomBatches(size, num_update_steps, strategy.rank, strategy.world_size, seed=context.rollouts.seed)
    combiner = RewardCombiner(generation.scorer.weights)
    models = GroupPasses(strategy, {"policy": context.models.actor})
    return EpisodeEstimator(context.algorithm, combiner, strategy, plan, models=models)


def _engine(context: TrainerContext) -> tuple[RolloutEngine, Callable[[int], None]]:
    strategy, actor = context.strategy, context.models.actor
    selected = load("engines", context.rollouts.engine)

    def build(model: nn.Module) -> RolloutEngine:
        engine_context = EngineContext(
            model=model, tokenizer=context.tokenizer, device=strategy.device, seed=context.rollouts.seed
        )
        return cast(RolloutEngine, selected.build(selected.component.config(), engine_context))

    return build_colocated_engine(strategy, actor, build=build, copy=lambda: _empty_copy(strategy.unwrap(actor)))


def _empty_copy(model: nn.Module) -> nn.Module:
    """Create a new model of the same architecture to load weights into, since a sharded model cannot be copied."""
    adapted: Any = model
    base = adapted.get_base_model() if is_lora(model) else adapted
    copy: Any = AutoModelForCausalLM.from_config(base.config, dtype=next(model.parameters()).dtype)
    copy.generation_config = deepcopy(base.generation_config)  # its EOS tokens
    if is_lora(model):
        from peft import get_peft_model

        copy = get_peft_model(copy, next(iter(adapted.peft_config.values())))
    return cast(nn.Module, copy)


def _passes(context: TrainerContext) -> GroupPasses:
    roles, strategy = context.models, context.strategy
    models = {"policy": roles.actor} | ({} if roles.critic is None else {"critic": roles.critic})
    around: dict[str, Any] = {}
    offloaded = set()
    if "reference" in context.algorithm.roles:
        if roles.initial is None or roles.initial is roles.actor:
            models["reference"] = roles.actor
            around["reference"] = strategy.unwrap(roles.actor).disable_adapter
        else:
            models["reference"] = reference = roles.initial.eval().requires_grad_(False)
            if not strategy.shards_parameters:
                if context.rollouts.offload_inference_models:
                    offloaded.add("reference")
                else:
                    reference.to(strategy.device)
    temperature = context.rollouts.sampling.temperature
    make = context.algorithm.passes
    return GroupPasses(strategy, models, make, temperature=temperature, around=around, offloaded=offloaded)
