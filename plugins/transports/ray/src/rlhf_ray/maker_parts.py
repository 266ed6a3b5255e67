"""What a maker of a run is built from: core's own parts, placed in an actor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.algorithm import RolloutAlgorithm
from rlhf_core.build import (
    build_algorithm,
    build_engine,
    build_evaluator,
    build_reference_pass,
    build_run_prompts,
    build_scorer,
    build_strategy,
    model_dtype,
)
from rlhf_core.config import ResolvedRun
from rlhf_core.hooks import HookRelay
from rlhf_core.models import load_policy, load_tokenizer
from rlhf_core.rollout import PolicyEvaluator
from rlhf_core.strategies import autocast_for
from rlhf_core.strategy import Strategy
from rlhf_core.types import Prompt, RolloutGroup

from .maker_worker import MakerWorker, trained_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class MakerParts:
    """A maker ready to work, once weights have arrived."""

    worker: MakerWorker
    prompt: Callable[[int], Prompt]
    keep: Callable[[RolloutGroup], bool]
    evaluator: PolicyEvaluator | None


class InferencePlace:
    """A process that only runs models forward: the trainers' device type, precision and nothing else of theirs.

    Stands where core asks a strategy for these; alone, it has nobody to gather from.
    """

    rank = 0
    world_size = 1
    shards_parameters = False

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def device(self) -> torch.device:
        return self._strategy.device

    @property
    def parameter_dtype(self) -> torch.dtype:
        return self._strategy.parameter_dtype

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return self._strategy.compute_dtype

    def autocast(self) -> AbstractContextManager[Any]:
        """The trainers' precision, over whole weights also where theirs are cast or sharded."""
        return autocast_for(self.compute_dtype, self.device)

    def model_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def prepare_inference(self, model: nn.Module) -> nn.Module:
        return model.to(self.device).eval().requires_grad_(False)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return tensor.clone()

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value]


def build_maker(
    resolved: ResolvedRun, hooks: HookRelay, *, sync_timeout_seconds: float, cache_folder: Path
) -> MakerParts:
    """Load tokenizer, models, prompts and rewards of a run; nothing is shared with a trainer.

    `cache_folder`: of the rewards' cache, which the makers of one machine share.
    """
    place: Any = InferencePlace(build_strategy(resolved))
    run = resolved.run
    tokenizer = load_tokenizer(run.model)
    algorithm = build_algorithm(resolved, tokenizer)
    policy = load_policy(run.model, dtype=model_dtype(resolved, place), seed=run.train.seed, tokenizer=tokenizer)
    critic = algorithm.build_critic(policy) if "critic" in algorithm.roles else None
    adapters = {role: trained_names(model) for role, model in _present(policy=policy, critic=critic)}
    for _, model in _present(policy=policy, critic=critic):
        place.prepare_inference(model)
    # One that learns from a dataset has its makers answer held-out prompts, and nothing else.
    rollouts = algorithm if isinstance(algorithm, RolloutAlgorithm) else None
    scoring = None if rollouts is None else build_reference_pass(resolved, rollouts, place, policy, critic)
    engine = build_engine(resolved, policy, tokenizer, place)
    worker = MakerWorker(
        engine=engine,
        tokenizer=tokenizer,
        sampling=resolved.sampling,
        samples_per_prompt=run.train.samples_per_prompt,
        scorer=build_scorer(resolved, place.device, cache_folder=cache_folder),
        hooks=hooks,
        policy=policy,
        critic=critic,
        policy_adapter=adapters["policy"],
        critic_adapter=adapters.get("critic", frozenset()),
        reference_pass=scoring,
        sync_idle_seconds=sync_timeout_seconds,
    )
    prompts = build_run_prompts(resolved, tokenizer)
    evaluator = None
    if resolved.evaluates:
        evaluator = build_evaluator(resolved, engine, tokenizer, worker.scorer, prompts, place)
    return MakerParts(worker, prompts.prompt, _keep_all if rollouts is None else rollouts.keep, evaluator)


def _keep_all(group: RolloutGroup) -> bool:
    return True


def _present(**models: nn.Module | None) -> Sequence[tuple[str, nn.Module]]:
    return [(role, model) for role, model in models.items() if model is not None]
