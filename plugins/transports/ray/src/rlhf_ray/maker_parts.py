"""The working parts of a maker, and how they are built: from a run file, or from the seed's factories. No Ray in here.

One thread calls `make`; another brings weights through `weights`. They meet at the border between two batches only; or,
with weights in flight, several threads call `make`, and all that is computed is computed on the thread of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rlhf_core.algorithm import RolloutAlgorithm
from rlhf_core.build import (
    build_algorithm,
    build_engine,
    build_evaluator,
    build_passes,
    build_player,
    build_run_prompts,
    build_scorer,
    build_strategy,
    model_dtype,
)
from rlhf_core.components import EngineContext
from rlhf_core.config import ResolvedRun, RewardCallOptions
from rlhf_core.errors import UserInputError
from rlhf_core.hooks import HookRelay
from rlhf_core.models import (
    GroupPasses,
    PassModels,
    adapter_off,
    disable_dropout,
    is_lora,
    load_policy,
    load_tokenizer,
)
from rlhf_core.plugins import load, resolve_build
from rlhf_core.protocols import InFlightEngine, RolloutEngine
from rlhf_core.rewards import RewardScorer, RewardSpec
from rlhf_core.rollout import (
    ModuleReceiver,
    PolicyEvaluator,
    PolicyExperienceMaker,
    SingleAnswers,
    success_of,
)
from rlhf_core.seed import seed_reward, strategy_by_name
from rlhf_core.strategies import autocast_for
from rlhf_core.strategy import Strategy
from rlhf_core.types import PhaseTimes, Prompt, RolloutGroup, SamplingParams

from .engine_thread import EngineThread
from .holder_weights import StagedWeights, WeightTarget

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class MakerWorker:
    """An engine, a scorer and, where needed, a reference and a critic; and the weights on their way to them."""

    def __init__(
        self,
        makers: Sequence[PolicyExperienceMaker],
        engine: RolloutEngine,
        scorer: RewardScorer,
        weights: StagedWeights,
        device: torch.device,
    ) -> None:
        """makers: one, or with an `EngineThread` as many as there are batches at a time. engine, scorer: of all.
        weights: on their way to the engine's models. device: of these models.
        """
        self.engine = engine
        self.scorer = scorer
        self.weights = weights
        self.device = device
        self.num_lanes = len(makers)
        self._makers = list(makers)
        self._free = list(makers)

    def make(self, prompts: Sequence[Prompt]) -> tuple[list[RolloutGroup], PhaseTimes]:
        """Make one batch, and say what it cost. Where the engine is no `EngineThread`, all of it with the newest
        whole version that had arrived when it began. At most `num_lanes` threads at a time.
        """
        maker = self._free.pop()
        try:
            with self.computing():
                groups = list(maker.make(prompts))
        finally:
            times = maker.take_times()
            self._free.append(maker)
        if isinstance(self.engine, EngineThread):
            times.rollout_s = self.engine.take_seconds()
        return groups, times

    def computing(self) -> AbstractContextManager[None]:
        """Context for computing with the engine; weights change in it only as the engine's thread lets them."""
        return nullcontext() if isinstance(self.engine, EngineThread) else self.weights.making()

    def close(self) -> None:
        """Free the engine, and end the processes of the environment and the rewards' threads and processes."""
        self.weights.close()
        with ExitStack() as stack:
            stack.callback(self.scorer.close)
            stack.callback(self.engine.close)
            for maker in self._makers:
                stack.callback(maker.close)


def staged_weights(
    engine: RolloutEngine,
    models: Mapping[str, nn.Module],
    adapters: Mapping[str, frozenset[str]],
    *,
    idle_seconds: float,
    published: Callable[[int], None] = lambda version: None,
) -> StagedWeights:
    """models: by role, the modules that take new weights: `policy`, which the engine generates with, and `critic`.
    adapters: by role, the names of an adapter-only version (see `trained_names`). published: called with each version.
    """
    targets = {"policy": WeightTarget(engine.receiver(), models["policy"], adapters["policy"], engine.weights_updated)}
    if (critic := models.get("critic")) is not None:
        received = ModuleReceiver(critic, on_commit=lambda version: None)
        targets["critic"] = WeightTarget(received, critic, adapters["critic"])
    return StagedWeights(targets, idle_seconds=idle_seconds, published=published)


class _BetweenSteps:
    """The passes over finished groups, on the engine's thread."""

    def __init__(self, plain: GroupPasses, engine: EngineThread) -> None:
        self._plain = plain
        self._engine = engine

    def run(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        return self._engine.run(partial(self._plain.run, groups))

    def published(self, version: int) -> None:
        self._plain.published(version)


def trained_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that are trained: adapter, and what is trained beside it (a value head, biases).

    Empty where everything is trained: there is no adapter then. Ask before freezing a model for inference.
    """
    parameters = dict(model.named_parameters())
    trained = frozenset(name for name, parameter in parameters.items() if parameter.requires_grad)
    return trained if len(trained) < len(parameters) else frozenset()


def _placed(models: Mapping[str, nn.Module], place: Any) -> dict[str, frozenset[str]]:
    """Freeze and place the models; returns by role the names of an adapter-only version (see `trained_names`)."""
    adapters = {role: trained_names(model) for role, model in models.items()}
    for model in models.values():
        disable_dropout(model)
        place.prepare_inference(model)
    return adapters


@dataclass(frozen=True, slots=True)
class MakerParts:
    """A maker of a run, ready to work once weights have arrived."""

    worker: MakerWorker
    hooks: HookRelay
    prompt: Callable[[int, int | None], Prompt]
    """The prompt of a position, and of the record that a curriculum has drawn for it."""
    keep: Callable[[RolloutGroup], bool]
    success: Callable[[RolloutGroup], float | None]
    evaluator: PolicyEvaluator | None


ValueT = TypeVar("ValueT")


class InferencePlace:
    """A process that only runs models forward: the trainers' device type, precision and nothing else of theirs.

    Stands where core asks a strategy for these; alone, it has nobody to gather from.
    """

    rank = 0
    world_size = 1
    shards_parameters = False

    def __init__(self, strategy: Strategy) -> None:
        self.device = strategy.device
        self.parameter_dtype = strategy.parameter_dtype
        self.compute_dtype = strategy.compute_dtype

    def agreed(self, value: ValueT) -> ValueT:
        return value

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
    resolved: ResolvedRun, hooks: HookRelay, *, num_lanes: int | None, sync_timeout_seconds: float, cache_folder: Path
) -> MakerParts:
    """Load tokenizer, models, prompts and rewards of a run; nothing is shared with a trainer.

    `num_lanes`: batches at a time, with weights in flight; None: one after the other. `cache_folder`: of the rewards'
    cache, which the makers of one machine share.
    """
    place: Any = InferencePlace(build_strategy(resolved))
    run = resolved.run
    tokenizer = load_tokenizer(run.model)
    algorithm = build_algorithm(resolved, tokenizer)
    policy = load_policy(run.model, dtype=model_dtype(resolved, place), seed=run.train.seed, tokenizer=tokenizer)
    models: dict[str, nn.Module] = {"policy": policy}
    if "critic" in algorithm.roles:
        models["critic"] = algorithm.build_critic(policy)
    adapters = _placed(models, place)
    # One that learns from a dataset has its makers answer held-out prompts, and nothing else.
    rollouts = algorithm if isinstance(algorithm, RolloutAlgorithm) else None
    scoring = None if rollouts is None else build_passes(resolved, rollouts, place, models)
    engine = build_engine(resolved, policy, tokenizer, place)
    weights = staged_weights(
        engine,
        models,
        adapters,
        idle_seconds=sync_timeout_seconds,
        published=(lambda version: None) if scoring is None else scoring.published,
    )
    complete: GroupPasses | _BetweenSteps | None = scoring
    if num_lanes is not None:
        assert isinstance(engine, InFlightEngine)
        engine = thread = EngineThread(engine, weights)
        complete = None if scoring is None else _BetweenSteps(scoring, thread)
    scorer = build_scorer(resolved, place.device, cache_folder=cache_folder)
    player = partial(build_player, resolved, engine, tokenizer)
    makers = [
        PolicyExperienceMaker(
            player=player(),
            greedy_player=player(greedy=True) if rollouts is not None and rollouts.needs_greedy_answer else None,
            samples_per_prompt=run.train.samples_per_prompt,
            scorer=scorer,
            hooks=hooks,
            passes=complete,
        )
        for _ in range(num_lanes or 1)
    ]
    worker = MakerWorker(makers, engine, scorer, weights, place.device)
    prompts = build_run_prompts(resolved, tokenizer)
    evaluator = None
    if resolved.evaluates:
        evaluator = build_evaluator(resolved, engine, tokenizer, scorer, prompts, place)
    keep = _keep_all if rollouts is None else rollouts.keep
    success = success_of(resolved.section("prompts.curriculum"))
    return MakerParts(worker, hooks, prompts.prompt, keep, success, evaluator)


def _keep_all(group: RolloutGroup) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class HolderModels:
    """The models that a `model_fn` returned, ready for inference."""

    actor: nn.Module
    critic: nn.Module | None
    reward: RewardSpec
    reference: nn.Module | None
    reference_context: Callable[[], AbstractContextManager[Any]]
    adapters: Mapping[str, frozenset[str]]
    """By role, the names of an adapter-only version."""


class IdTokenizer:
    """Stands in where a maker is given token ids only: texts are the ids, with spaces between."""

    pad_token_id: int | None = None
    chat_template: str | None = None

    def __init__(self, eos_token_id: int | Sequence[int] | None) -> None:
        self.eos_token_id = eos_token_id

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The ids; the EOS is left out where special tokens are not wanted."""
        special = self.eos_token_id if isinstance(self.eos_token_id, Sequence) else (self.eos_token_id,)
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i in special))


def make_place(strategy_fn: Callable[[], Any]) -> InferencePlace:
    """Where the factory's strategy computes. A ColossalAI booster trains only: a maker then computes as `single`."""
    strategy = strategy_fn()
    return InferencePlace(strategy if isinstance(strategy, Strategy) else strategy_by_name("single"))


def make_models(model_fn: Callable[[], tuple[Any, ...]], place: Any, *, kl_coef: float, seed: int = 0) -> HolderModels:
    """Build and place the models; `seed` is for an installed reward.

    Raises `UserInputError` when the factory returned something else.
    """
    from torch import nn

    returned = model_fn()
    if not isinstance(returned, tuple | list) or len(returned) != 4:
        raise UserInputError(
            "it must return (actor, critic, reward model, initial model)", where="model_fn of the experience maker"
        )
    actor, critic, reward, initial = returned
    if not isinstance(actor, nn.Module):
        raise UserInputError(f"the actor is a {type(actor).__name__}, not a causal language model", where="model_fn")
    adapters = _placed({"policy": actor} if critic is None else {"policy": actor, "critic": critic}, place)
    reference, context = _reference(actor, initial, place, kl_coef)
    return HolderModels(
        actor=actor,
        critic=critic,
        reward=seed_reward(reward, place.device, offload=False, seed=seed, where="model_fn"),
        reference=reference,
        reference_context=context,
        adapters=adapters,
    )


def _reference(
    actor: nn.Module, initial: nn.Module | None, place: Any, kl_coef: float
) -> tuple[nn.Module | None, Callable[[], AbstractContextManager[Any]]]:
    """The initial model, or the actor with its adapter off; none where no KL is used."""
    if kl_coef == 0:
        return None, nullcontext
    if initial is not None and initial is not actor:
        _placed({"reference": initial}, place)
        return initial, nullcontext
    if is_lora(actor):
        return actor, partial(adapter_off, actor)
    raise UserInputError(
        "the initial model is the actor itself, which changes" if initial is actor else "there is no initial model",
        where="model_fn",
        hint="return a copy of the actor as it starts (copy.deepcopy), or set kl_coef=0",
    )


def make_worker(
    models: HolderModels,
    place: Any,
    tokenizer: Any,
    sampling: SamplingParams,
    hooks: HookRelay,
    *,
    engine: str,
    engine_options: Mapping[str, Any],
    seed: int,
    kl_coef: float,
    reward_timeout_seconds: float,
    sync_idle_seconds: float,
) -> MakerWorker:
    """An engine over the actor, a scorer over the reward, a pass over reference and critic."""
    selected = load("engines", engine)
    context = EngineContext(model=models.actor, tokenizer=tokenizer, device=place.device, seed=seed)
    options = selected.component.config.model_validate(dict(engine_options))
    built = cast(RolloutEngine, resolve_build(selected)(options, context))
    call_options = RewardCallOptions(timeout_seconds=reward_timeout_seconds)
    by_role = {"policy": models.actor, "critic": models.critic, "reference": models.reference}
    here = {role: model for role, model in by_role.items() if model is not None}
    around = {"reference": models.reference_context}
    passes = PassModels(place, here, temperature=sampling.temperature, around=around)
    scorer = RewardScorer([replace(models.reward, name="reward", call_options=call_options)])
    maker = PolicyExperienceMaker(
        player=SingleAnswers(built, tokenizer, sampling),
        samples_per_prompt=1,
        scorer=scorer,
        hooks=hooks,
        passes=GroupPasses(place, passes.passes_of(frozenset(here))),
        kl_coef=kl_coef,
        number=lambda position, k: position,
    )
    trained = {role: model for role, model in here.items() if role != "reference"}
    weights = staged_weights(built, trained, models.adapters, idle_seconds=sync_idle_seconds)
    return MakerWorker([maker], built, scorer, weights, place.device)
