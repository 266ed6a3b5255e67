"""The working parts of a maker, built from a run file or from the seed's factories. Independent of Ray.

One thread calls `make`, another delivers weights through `weights`. They synchronize only between two batches. With
weights in flight, several threads call `make`, and the engine's thread does all computation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlhf_core import Column
from rlhf_core.algorithm import GroupPass, PassContext
from rlhf_core.components import EngineContext
from rlhf_core.config import ResolvedRun, RewardCallOptions
from rlhf_core.errors import UserInputError
from rlhf_core.hooks import HookRelay
from rlhf_core.models import GroupPasses
from rlhf_core.place import LocalPlace, Place
from rlhf_core.plugins import load
from rlhf_core.protocols import InFlightEngine, RolloutEngine
from rlhf_core.rewards import RewardScorer
from rlhf_core.rollout import (
    PolicyExperienceMaker,
    SingleTurnPlayer,
)
from rlhf_core.strategy import Strategy
from rlhf_core.types import PhaseTimes, Prompt, RolloutGroup, SamplingParams
from rlhf_core.wiring import RunInputs, RunParts, build_strategy
from rlhf_forward import model_passes
from rlhf_models import disable_dropout, is_lora
from rlhf_seed import seed_reward, set_eos, strategy_by_name

from .engine_thread import SharedEngine
from .holder_weights import StagedWeights

if TYPE_CHECKING:
    import torch
    from torch import nn


class MakerWorker:
    """Makes batches of groups with an engine, a scorer, and optionally a reference and a critic."""

    def __init__(
        self,
        makers: Sequence[PolicyExperienceMaker],
        engine: RolloutEngine,
        scorer: RewardScorer,
        weights: StagedWeights,
        device: torch.device,
    ) -> None:
        """Create the worker.

        Args:
            makers: One, or with a `SharedEngine` one per concurrent batch.
            engine: Engine of all makers.
            scorer: Scorer of all makers.
            weights: New weights for the models of the engine.
            device: Device of these models.
        """
        self.engine = engine
        self.scorer = scorer
        self.weights = weights
        self.device = device
        self.max_batches = len(makers)
        self._makers = list(makers)
        self._free = list(makers)

    def make(self, prompts: Sequence[Prompt]) -> tuple[list[RolloutGroup], PhaseTimes]:
        """Make one batch. At most `max_batches` threads at a time.

        Without a `SharedEngine`, the whole batch uses the newest complete version at its start.

        Args:
            prompts: Prompts of the batch.

        Returns:
            The groups, and the time that they took.
        """
        maker = self._free.pop()
        try:
            with self.computing():
                groups = list(maker.make(prompts))
        finally:
            times = maker.take_times()
            self._free.append(maker)
        if isinstance(self.engine, SharedEngine):
            times.rollout_s = self.engine.take_seconds()
        return groups, times

    def computing(self) -> AbstractContextManager[None]:
        """Context for computing with the engine. Only a `SharedEngine`'s thread may change the weights inside it."""
        return nullcontext() if isinstance(self.engine, SharedEngine) else self.weights.making()

    def state_dict(self) -> dict[str, Any]:
        """State of the rewards and of each maker's players. Empty if they keep no state."""
        players = [maker.state_dict() for maker in self._makers]
        parts = {"rewards": self.scorer.state_dict(), "players": players if any(players) else []}
        return {name: part for name, part in parts.items() if part}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, which may have another number of makers."""
        self.scorer.load_state_dict(state.get("rewards", {}))
        players = state.get("players") or [{}]
        for index, maker in enumerate(self._makers):
            maker.load_state_dict(players[index % len(players)])

    def close(self) -> None:
        """Free the engine, and stop the environments' processes and the rewards' threads and processes."""
        self.weights.close()
        with ExitStack() as stack:
            stack.callback(self.scorer.close)
            stack.callback(self.engine.close)
            for maker in self._makers:
                stack.callback(maker.close)


class _EngineThreadPasses(GroupPasses):
    """Runs the passes over finished groups on the engine's thread."""

    def __init__(self, plain: GroupPasses, engine: SharedEngine) -> None:
        self._plain = plain
        self._engine = engine
        self.passes = plain.passes  # with their states

    def run(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        return self._engine.run(partial(self._plain.run, groups))

    def published(self, version: int) -> None:
        self._plain.published(version)


class _TemperatureColumn(GroupPass):
    """Adds core's column `temperature`, so that a trainer without sampling options can interpret log-probs.

    Temperatures that the engine has reported are kept.
    """

    columns: Mapping[str, Column] = {"temperature": Column(optional=True)}

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature

    def run(self, groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
        items = [item for group in groups for item in group.items]
        reported = [item.columns.get("temperature", [0.0] * item.num_response_tokens) for item in items]
        return [{"temperature": [float(each) or self._temperature for each in row]} for row in reported]


def trained_names(model: nn.Module) -> frozenset[str]:
    """Names of the trained parameters: the adapter, and others such as a value head or biases.

    Empty if all parameters are trained (a model without adapter). Call before freezing a model for inference.

    Example:
        >>> from torch import nn
        >>> model = nn.Linear(2, 2)
        >>> _ = model.weight.requires_grad_(False)
        >>> trained_names(model)
        frozenset({'bias'})
    """
    parameters = dict(model.named_parameters())
    trained = frozenset(name for name, parameter in parameters.items() if parameter.requires_grad)
    return trained if len(trained) < len(parameters) else frozenset()


def _prepare_models(models: Mapping[str, nn.Module], place: Place) -> dict[str, frozenset[str]]:
    """Freeze and place the models, and return role -> names of an adapter-only version (see `trained_names`)."""
    adapters = {role: trained_names(model) for role, model in models.items()}
    for model in models.values():
        disable_dropout(model)
        place.prepare_inference(model)
    return adapters


def build_maker(
    resolved: ResolvedRun,
    hooks: HookRelay,
    *,
    max_batches: int | None,
    sync_timeout_seconds: float,
    cache_folder: Path,
    run_folder: Path,
) -> tuple[MakerWorker, RunParts]:
    """Build a maker of a run, which shares nothing with a trainer.

    Args:
        resolved: The resolved run file.
        hooks: Hooks of the maker.
        max_batches: Number of concurrent batches with weights in flight. None: one batch at a time.
        sync_timeout_seconds: Time without a chunk after which an incomplete version is dropped.
        cache_folder: Folder of the rewards' cache, which the makers of one machine share.
        run_folder: The run folder, which may not exist on this machine.

    Returns:
        The worker, and the parts of the run that it loaded.
    """
    place, inputs = LocalPlace.like(build_strategy(resolved)), RunInputs(resolved)
    run = RunParts(inputs, place, cache_folder=cache_folder, run_folder=run_folder)
    models = run.models
    adapters = _prepare_models(models, place)
    # If a run trains on a dataset, its makers only answer held-out prompts.
    passes, engine = run.passes, run.engine

    def published(version: int) -> None:
        engine.weights_updated(version)
        if passes is not None:
            passes.published(version)

    weights = StagedWeights(models, adapters, idle_seconds=sync_timeout_seconds, published=published)
    if max_batches is not None:
        assert isinstance(engine, InFlightEngine)
        run.engine = thread = SharedEngine(engine, weights)
        run.passes = None if passes is None else _EngineThreadPasses(passes, thread)
    makers = [run.maker(hooks) for _ in range(max_batches or 1)]
    worker = MakerWorker(makers, run.engine, run.scorer, weights, place.device)
    return worker, run


def make_place(strategy_fn: Callable[[], Any]) -> LocalPlace:
    """Place of the factory's strategy. A ColossalAI booster can only train, so the maker uses that of `single`."""
    strategy = strategy_fn()
    return LocalPlace.like(strategy if isinstance(strategy, Strategy) else strategy_by_name("single"))


def _reference(
    actor: nn.Module, initial: nn.Module | None, place: Place, kl_coef: float
) -> tuple[nn.Module | None, Callable[[], AbstractContextManager[Any]]]:
    """Select the reference model of the KL penalty.

    Returns the model, None if `kl_coef` is 0, and a function that creates the context manager to run it in: a null
    context, or one that disables the LoRA adapter if the actor itself is the reference. A separate initial model is
    prepared on `place`. Raises `UserInputError` if the factory returned neither a usable initial model nor an adapter.
    """
    if kl_coef == 0:
        return None, nullcontext
    if initial is not None and initial is not actor:
        _prepare_models({"reference": initial}, place)
        return initial, nullcontext
    if is_lora(actor):
        return actor, actor.disable_adapter  # type: ignore[return-value]  # of PEFT
    raise UserInputError(
        "the initial model is the actor itself, which changes" if initial is actor else "the initial model is missing",
        where="model_fn",
        hint="return a copy of the initial actor (copy.deepcopy), or set kl_coef=0",
    )


def make_worker(
    model_fn: Callable[[], tuple[Any, ...]],
    place: Place,
    tokenizer: Any,
    sampling: SamplingParams,
    hooks: HookRelay,
    *,
    eos_token_id: Any,
    engine: str,
    engine_options: Mapping[str, Any],
    seed: int,
    kl_coef: float,
    reward_timeout_seconds: float,
    sync_idle_seconds: float,
) -> MakerWorker:
    """Build a maker from the models of a factory.

    Args:
        model_fn: Returns (actor, critic, reward model, initial model).
        place: Device and precision.
        tokenizer, sampling, hooks: Tokenizer of the actor, sampling parameters, and hooks of the maker.
        eos_token_id: Id or ids that end an answer. None keeps those of the actor.
        engine, engine_options, seed, kl_coef: As in `ExperienceMakerHolder`.
        reward_timeout_seconds, sync_idle_seconds: As in `ExperienceMakerHolder`.

    Returns:
        The worker.

    Raises:
        UserInputError: The factory returned something else.
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
    set_eos(actor, eos_token_id)
    trained = {"policy": actor} if critic is None else {"policy": actor, "critic": critic}
    adapters = _prepare_models(trained, place)
    reference, around = _reference(actor, initial, place, kl_coef)
    models = trained if reference is None else {**trained, "reference": reference}
    spec = seed_reward(reward, place.device, offload=False, seed=seed, where="model_fn")
    call_options = RewardCallOptions(timeout_seconds=reward_timeout_seconds)
    scorer = RewardScorer([replace(spec, name="reward", call_options=call_options)])
    selected = load("engines", engine)
    context = EngineContext(model=actor, tokenizer=tokenizer, device=place.device, seed=seed)
    options = selected.component.config.model_validate(dict(engine_options))
    generator = cast(RolloutEngine, selected.build(options, context))

    def make(context: PassContext) -> list[GroupPass]:
        temperature = [] if sampling.temperature == 1.0 else [_TemperatureColumn(sampling.temperature)]
        return [*model_passes(context, models.keys()), *temperature]

    passes = GroupPasses(place, models, make, temperature=sampling.temperature, around={"reference": around})
    maker = PolicyExperienceMaker(
        player=SingleTurnPlayer(generator, tokenizer, sampling),
        samples_per_prompt=1,
        scorer=scorer,
        hooks=hooks,
        passes=passes,
        kl_coef=kl_coef,
        number=lambda position, k: position,
    )
    weights = StagedWeights(trained, adapters, idle_seconds=sync_idle_seconds, published=generator.weights_updated)
    return MakerWorker([maker], generator, scorer, weights, place.device)
