"""The parts of a run around the models of one process. Transports use the parts they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..algorithm import RolloutAlgorithm
from ..components import EngineContext, RewardContext
from ..config.processes import TransportConfig
from ..config.resolved import Configured
from ..config.sections import RewardEntry
from ..hooks.relay import HookRelay
from ..models.kinds import model_kind_of
from ..models.passes import GroupPasses
from ..place import Place
from ..protocols import RolloutEngine
from ..rewards.scorer import RewardScorer, make_reward_spec
from ..rollout.evaluate import EvaluatedSet, PolicyEvaluator, at_temperature
from ..rollout.maker import PolicyExperienceMaker
from ..rollout.player import Purpose, RunPlayer
from ..rollout.weight_sync import build_colocated_engine
from ..strategy import Strategy
from ..types import Role, SamplingParams
from .inputs import RunInputs
from .models import load_models, load_start_policy, model_dtype, place_frozen, prepare

if TYPE_CHECKING:
    from torch import nn


class RunParts:
    """Engine, rewards, passes, makers and evaluation around models. Each is built on first use.

    The order of first uses is therefore the order in which models are loaded. `close` ends all parts.

    Args:
        inputs: tokenizer, algorithm and prompts.
        place: the processes and device of the models.
        models: role -> model, instead of loading those of the run.
        cache_folder: folder for caches of rewards, None to disable them.
        run_folder: folder for journals of players. It may be missing on this machine.

    Example:
        inputs = RunInputs(resolved)
        with closing(RunParts(inputs, LocalPlace.like(build_strategy(resolved)))) as parts:
            groups = list(parts.maker(hooks).make(prompts))
    """

    def __init__(
        self,
        inputs: RunInputs,
        place: Place,
        *,
        models: Mapping[Role, nn.Module] | None = None,
        cache_folder: Path | None = None,
        run_folder: Path | None = None,
    ) -> None:
        """Build nothing yet."""
        self.inputs = inputs
        self.resolved = inputs.resolved
        self.place = place
        self._loaded_models = models
        self._cache_folder = cache_folder
        self._run_folder = run_folder
        self._resources = ExitStack()

    @cached_property
    def models(self) -> Mapping[Role, nn.Module]:
        """Policy and, if the algorithm has one, critic of this process."""
        return load_models(self.inputs, self.place) if self._loaded_models is None else self._loaded_models

    @cached_property
    def engine(self) -> RolloutEngine:
        """The engine over the policy of this process. A transport may set another one that wraps it."""
        return self._resources.enter_context(closing(self._engine_over(self.place.unwrap(self.models["policy"]))))

    def _engine_over(self, model: nn.Module) -> RolloutEngine:
        """Build the run's engine over `model`."""
        resolved = self.resolved
        context = EngineContext(
            model,
            self.inputs.tokenizer,
            device=self.place.device,
            seed=resolved.run.train.seed,
            model_path=resolved.run.model.path,
            compute_dtype=self.place.compute_dtype,
            in_flight=resolved.transport.typed(TransportConfig).updates_in_flight(),
        )
        return cast(RolloutEngine, resolved.engine.build(resolved.engine.config, context))

    @cached_property
    def scorer(self) -> RewardScorer:
        """All rewards of the run."""
        return self._scorer_of(self.resolved.rewards, self._cache_folder)

    def _scorer_of(self, rewards: Sequence[Configured], cache_folder: Path | None = None) -> RewardScorer:
        """Build a scorer of these rewards, which `close` ends."""
        run = self.resolved.run
        context = RewardContext(str(self.place.device), run.train.seed, run.model.path, cache_folder)
        specs = []
        for reward in rewards:
            entry = reward.typed(RewardEntry)
            specs.append(make_reward_spec(reward, entry, context, entry, name=entry.label, weight=entry.weight))
        return self._resources.enter_context(closing(RewardScorer(specs)))

    def player(self, purpose: Purpose, sampling: SamplingParams) -> RunPlayer:
        """Return a new player, through which the policy answers prompts."""
        run, seed = self.resolved, self.resolved.run.train.seed
        tokenizer, folder = self.inputs.tokenizer, self._run_folder
        return RunPlayer(run, self.engine, tokenizer, sampling, seed=seed, purpose=purpose, folder=folder)

    @cached_property
    def passes(self) -> GroupPasses | None:
        """The algorithm's passes over finished samples, None if it learns from a dataset. Transports may wrap them."""
        return self.pass_models if isinstance(self.inputs.algorithm, RolloutAlgorithm) else None

    @cached_property
    def pass_models(self) -> GroupPasses:
        """The passes with the models that run forward: policy, critic, reference, and others the algorithm declares.

        With LoRA the reference is the policy with its adapter off. Models may be in host memory between their passes,
        unless they are sharded, or the policy itself.
        """
        resolved, algorithm, place = self.resolved, self.inputs.algorithm, self.place
        models, offloaded = dict(self.models), set()
        around: dict[Role, Any] = {}
        if "reference" in algorithm.roles:
            inner = place.unwrap(policy := self.models["policy"])
            if (adapter_off := model_kind_of(inner).adapter_off(inner)) is not None:
                models["reference"], around["reference"] = policy, adapter_off
            else:
                with place.model_init_context():
                    model = load_start_policy(resolved, place)
                models["reference"] = place.prepare_inference(model)
                if resolved.run.model.offload_reference:
                    offloaded.add("reference")
        dtype = model_dtype(resolved, place)
        for role, each in getattr(algorithm, "frozen_models", {}).items():
            models[role] = place_frozen(role, each, place, dtype=dtype, seed=resolved.run.train.seed)
            if each.offload:
                offloaded.add(role)
        return GroupPasses(
            place,
            models,
            algorithm.passes if isinstance(algorithm, RolloutAlgorithm) else None,
            temperature=resolved.sampling.temperature,
            batch_tokens=resolved.run.train.micro_batch_tokens,
            around=around,
            offloaded=() if place.shards_parameters else offloaded,
        )

    def maker(self, hooks: HookRelay) -> PolicyExperienceMaker:
        """Return a new maker of the run's samples. All makers share engine, rewards and passes."""
        algorithm, sampling = self.inputs.algorithm, self.resolved.sampling
        is_greedy = isinstance(algorithm, RolloutAlgorithm) and algorithm.needs_greedy_answer
        maker = PolicyExperienceMaker(
            player=self.player("train", sampling),
            greedy_player=self.player("greedy", at_temperature(sampling, 0)) if is_greedy else None,
            samples_per_prompt=self.resolved.run.train.samples_per_prompt,
            scorer=self.scorer,
            hooks=hooks,
            passes=self.passes,
        )
        return self._resources.enter_context(closing(maker))

    @cached_property
    def evaluator(self) -> PolicyEvaluator | None:
        """Scores the policy on held-out prompts, or on the first ones of separate sources. None without evaluation."""
        options = self.resolved.run.eval
        if options is None or not self.resolved.evaluation_sets:
            return None
        streams = self.inputs.eval_prompts
        sets = []
        for name, set_options in self.resolved.evaluation_sets:
            other, stream = self.resolved.eval_rewards.get(name or ""), streams.get(name)
            scorer = self.scorer if other is None else self._scorer_of(other)
            source, first = (self.inputs.prompts, None) if stream is None else (stream, set_options.num_prompts)
            prompts = source.evaluation_prompts(first)
            sets.append(EvaluatedSet(name=name, options=set_options, prompts=prompts, scorer=scorer))
        evaluator = PolicyEvaluator(
            sets,
            player=partial(self.player, "evaluation"),
            sampling=self.resolved.sampling,
            batch_size=options.batch_size,
            place=self.place,
        )
        return self._resources.enter_context(closing(evaluator))

    def close(self) -> None:
        """Close all parts, the newest first."""
        self._resources.close()


class TrainerParts(RunParts):
    """The parts of a process that trains: loads policy and critic, and has the joined strategy prepare them.

    Args:
        inputs: tokenizer, algorithm and prompts.
        strategy: has joined its process group.
        run_folder: folder for the rewards' cache and the journals of players.
    """

    def __init__(self, inputs: RunInputs, strategy: Strategy, *, run_folder: Path | None = None) -> None:
        """Load and prepare the models."""
        self.strategy = strategy
        models = load_models(inputs, strategy, trains=True)
        self.trained = {role: prepare(inputs.resolved, role, model, strategy) for role, model in models.items()}
        """By role: prepared model, optimizer and schedule."""
        cache_folder = None if run_folder is None else run_folder / "reward-cache"
        models = {role: each.model for role, each in self.trained.items()}
        super().__init__(inputs, strategy, models=models, cache_folder=cache_folder, run_folder=run_folder)

    @cached_property
    def _engine_and_publish(self) -> tuple[RolloutEngine, Callable[[int], None]]:
        """The engine, and the function that copies the policy's weights into it."""
        engine, publish = build_colocated_engine(
            self.strategy,
            self.models["policy"],
            build=self._engine_over,
            copy=lambda: load_start_policy(self.resolved, self.strategy),
        )
        return self._resources.enter_context(closing(engine)), publish

    @cached_property
    def engine(self) -> RolloutEngine:
        return self._engine_and_publish[0]

    @property
    def publish(self) -> Callable[[int], None]:
        """Function that copies the policy's weights into `engine`, as a version."""
        return self._engine_and_publish[1]
