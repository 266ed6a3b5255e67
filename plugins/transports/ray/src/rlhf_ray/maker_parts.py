"""The working parts of a maker, and how they are built: from a run file, or from the seed's factories. No Ray in here.

One thread calls `make`; another brings weights through `weights`. They meet at the border between two batches only; or,
with weights in flight, several threads call `make`, and all that is computed is computed on the thread of the engine.
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
    """An engine, a scorer and, where needed, a reference and a critic; and the weights on their way to them."""

    def __init__(
        self,
        makers: Sequence[PolicyExperienceMaker],
        engine: RolloutEngine,
        scorer: RewardScorer,
        weights: StagedWeights,
        device: torch.device,
    ) -> None:
        """makers: one, or with a `SharedEngine` as many as there are batches at a time. engine, scorer: of all.
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
        """Make one batch, and say what it cost. Where the engine is no `SharedEngine`, all of it with the newest
        whole version that had arrived when it began. At most `num_lanes` threads at a time.
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
        """Context for computing with the engine; weights change in it only as the engine's thread lets them."""
        return nullcontext() if isinstance(self.engine, SharedEngine) else self.weights.making()

    def state_dict(self) -> dict[str, Any]:
        """State of the rewards, and of each lane's players; empty if none keeps any."""
        players = [maker.state_dict() for maker in self._makers]
        parts = {"rewards": self.scorer.state_dict(), "players": players if any(players) else []}
        return {name: part for name, part in parts.items() if part}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, which may be of another number of lanes."""
        self.scorer.load_state_dict(state.get("rewards", {}))
        players = state.get("players") or [{}]
        for lane, maker in enumerate(self._makers):
            maker.load_state_dict(players[lane % len(players)])

    def close(self) -> None:
        """Free the engine, and end the processes of the environment and the rewards' threads and processes."""
        self.weights.close()
        with ExitStack() as stack:
            stack.callback(self.scorer.close)
            stack.callback(self.engine.close)
            for maker in self._makers:
                stack.callback(maker.close)


class _BetweenSteps(GroupPasses):
    """The passes over finished groups, on the engine's thread."""

    def __init__(self, plain: GroupPasses, engine: SharedEngine) -> None:
        self._plain = plain
        self._engine = engine

    def run(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        return self._engine.run(partial(self._plain.run, groups))

    def published(self, version: int) -> None:
        self._plain.published(version)


class _SampledAt(GroupPass):
    """Core's column `temperature`, by which a trainer that has no sampling options reads log-probs.

    What the engine itself has reported of a token is kept.
    """

    columns: Mapping[str, Column] = {"temperature": Column(optional=True)}

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature

    def run(self, groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
        items = [item for group in groups for item in group.items]
        owns = [item.columns.get("temperature", [0.0] * item.num_response_tokens) for item in items]
        return [{"temperature": [float(each) or self._temperature for each in own]} for own in owns]


def trained_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that are trained: adapter, and what is trained beside it (a value head, biases).

    Empty where everything is trained: there is no adapter then. Ask before freezing a model for inference.
    """
    parameters = dict(model.named_parameters())
    trained = frozenset(name for name, parameter in parameters.items() if parameter.requires_grad)
    return trained if len(trained) < len(parameters) else frozenset()


def _placed(models: Mapping[str, nn.Module], place: Place) -> dict[str, frozenset[str]]:
    """Freeze and place the models; returns by role the names of an adapter-only version (see `trained_names`)."""
    adapters = {role: trained_names(model) for role, model in models.items()}
    for model in models.values():
        disable_dropout(model)
        place.prepare_inference(model)
    return adapters


def build_maker(
    resolved: ResolvedRun,
    hooks: HookRelay,
    *,
    num_lanes: int | None,
    sync_timeout_seconds: float,
    cache_folder: Path,
    run_folder: Path,
) -> tuple[MakerWorker, RunParts]:
    """A maker of a run, and the parts of the run that it has loaded; nothing is shared with a trainer.

    `num_lanes`: batches at a time, with weights in flight; None: one after the other. `cache_folder`: of the rewards'
    cache, which the makers of one machine share. `run_folder`: may not exist on this machine.
    """
    place, inputs = LocalPlace.like(build_strategy(resolved)), RunInputs(resolved)
    run = RunParts(inputs, place, cache_folder=cache_folder, run_folder=run_folder)
    models = run.models
    adapters = _placed(models, place)
    # One that learns from a dataset has its makers answer held-out prompts, and nothing else.
    passes, engine = run.passes, run.engine

    def published(version: int) -> None:
        engine.weights_updated(version)
        if passes is not None:
            passes.published(version)

    weights = StagedWeights(models, adapters, idle_seconds=sync_timeout_seconds, published=published)
    if num_lanes is not None:
        assert isinstance(engine, InFlightEngine)
        run.engine = thread = SharedEngine(engine, weights)
        run.passes = None if passes is None else _BetweenSteps(passes, thread)
    makers = [run.maker(hooks) for _ in range(num_lanes or 1)]
    worker = MakerWorker(makers, run.engine, run.scorer, weights, place.device)
    return worker, run


def make_place(strategy_fn: Callable[[], Any]) -> LocalPlace:
    """Where the factory's strategy computes. A ColossalAI booster trains only: a maker then computes as `single`."""
    strategy = strategy_fn()
    return LocalPlace.like(strategy if isinstance(strategy, Strategy) else strategy_by_name("single"))


def _reference(
    actor: nn.Module, initial: nn.Module | None, place: Place, kl_coef: float
) -> tuple[nn.Module | None, Callable[[], AbstractContextManager[Any]]]:
    """The initial model, or the actor with its adapter off; none where no KL is used."""
    if kl_coef == 0:
        return None, nullcontext
    if initial is not None and initial is not actor:
        _placed({"reference": initial}, place)
        return initial, nullcontext
    if is_lora(actor):
        return actor, actor.disable_adapter  # type: ignore[return-value]  # of PEFT
    raise UserInputError(
        "the initial model is the actor itself, which changes" if initial is actor else "there is no initial model",
        where="model_fn",
        hint="return a copy of the actor as it starts (copy.deepcopy), or set kl_coef=0",
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
    """An engine over the actor that the factory returns, a scorer over its reward, a pass over reference and critic.

    Raises `UserInputError` when the factory returns something else.
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
    adapters = _placed(trained, place)
    reference, around = _reference(actor, initial, place, kl_coef)
    models = trained if reference is None else {**trained, "reference": reference}
    spec = seed_reward(reward, place.device, offload=False, seed=seed, where="model_fn")
    call_options = RewardCallOptions(timeout_seconds=reward_timeout_seconds)
    scorer = RewardScorer([replace(spec, name="reward", call_options=call_options)])
    selected = load("engines", engine)
    context = EngineContext(model=actor, tokenizer=tokenizer, device=place.device, seed=seed)
    options = selected.component.config.model_validate(dict(engine_options))
    built = cast(RolloutEngine, selected.build(options, context))

    def make(context: PassContext) -> list[GroupPass]:
        sampled_at = [] if sampling.temperature == 1.0 else [_SampledAt(sampling.temperature)]
        return [*model_passes(context, models.keys()), *sampled_at]

    passes = GroupPasses(place, models, make, temperature=sampling.temperature, around={"reference": around})
    maker = PolicyExperienceMaker(
        player=SingleTurnPlayer(built, tokenizer, sampling),
        samples_per_prompt=1,
        scorer=scorer,
        hooks=hooks,
        passes=passes,
        kl_coef=kl_coef,
        number=lambda position, k: position,
    )
    weights = StagedWeights(trained, adapters, idle_seconds=sync_idle_seconds, published=built.weights_updated)
    return MakerWorker([maker], built, scorer, weights, place.device)
