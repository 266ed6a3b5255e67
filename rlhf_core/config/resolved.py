"""A run with nothing left open, as transports and plugins get it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..types import SamplingParams
from .command import commands_of
from .listed import listed_mapping
from .load import ENVIRONMENT_SECTION, PLUGIN_SECTIONS
from .section import OwnProcesses, TransportConfig
from .sections import DEFAULT_LOGGER, EvalSetOptions, RunConfig
from .selected import Configured, SelectedEnvironment, SelectedEvalSet, SelectedReward


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """A run with nothing left open: the core sections typed, every plugin selected and configured."""

    run: RunConfig
    algorithm: Configured
    strategy: Configured
    engine: Configured
    transport: Configured
    prompts: Configured
    eval_prompts: Configured | None
    """Another source for evaluation; None holds prompts of `prompts` out."""
    rewards: tuple[SelectedReward, ...]
    environment: SelectedEnvironment | None = None
    """None where a prompt has one answer."""
    eval_sets: tuple[SelectedEvalSet, ...] = ()
    """Sets beside that of the section `eval` itself."""
    hooks: tuple[Configured, ...] = ()
    """Hook plugins with options that the run lists."""
    loggers: tuple[Configured, ...] = ()
    """Where the metrics go, beside `metrics.jsonl`."""

    @property
    def reward_weights(self) -> dict[str, float]:
        """Name of each reward -> its weight in the combined score; the environment's comes first."""
        weights = {reward.name: reward.weight for reward in self.rewards}
        if self.environment is None:
            return weights
        return {ENVIRONMENT_SECTION: self.environment.options.weight, **weights}

    @property
    def sampling(self) -> SamplingParams:
        """How rollouts are sampled."""
        return self.run.engine.sampling()

    @property
    def own_processes(self) -> OwnProcesses | None:
        """Those that the transport starts itself."""
        assert isinstance(self.transport.config, TransportConfig)
        return self.transport.config.own_processes()

    @property
    def updates_in_flight(self) -> bool:
        """Whether new weights come while answers are sampled."""
        assert isinstance(self.transport.config, TransportConfig)
        return self.transport.config.updates_in_flight()

    @property
    def rolls_out(self) -> bool:
        """Whether answers are sampled to learn from."""
        return self.algorithm.component.feeds == "rollouts"

    @property
    def evaluates(self) -> bool:
        """Whether held-out prompts are answered and judged."""
        return bool(self.evaluation_sets)

    @property
    def evaluation_sets(self) -> tuple[tuple[str | None, EvalSetOptions], ...]:
        """Name and options of each set that is answered and judged, in order; the section `eval` has no name."""
        own = self.run.eval
        answers_own = own is not None and own.num_prompts > 0 and bool(self.reward_weights)
        named = tuple((each.name, each.options) for each in self.eval_sets)
        return ((None, own), *named) if own is not None and answers_own else named

    @property
    def measures_eval_records(self) -> bool:
        """Whether `eval.prompts` holds records of a dataset that are measured, not prompts that are answered."""
        return self.eval_prompts is not None and not self.rolls_out and not self.reward_weights

    @property
    def generates(self) -> bool:
        """Whether an engine is needed at all."""
        return self.rolls_out or self.evaluates

    @property
    def commands(self) -> frozenset[tuple[str, ...]]:
        """The programs, with their arguments, that options of its plugins name."""
        parts = [getattr(self, name) for name in PLUGIN_SECTIONS]
        parts += [self.eval_prompts, self.environment and self.environment.selected, *self.rewards]
        parts += [*self.hooks, *self.loggers]
        for each in self.eval_sets:
            parts += [each.prompts, *(each.rewards or ())]
        return frozenset(tuple(command) for part in parts if part for _, command in commands_of(part.config))

    def to_mapping(self) -> dict[str, Any]:
        """The whole run as JSON values; `resolve` of it gives the same run again."""
        core = self.run.model_dump(mode="json")
        if core["eval"] is not None:
            core["eval"]["prompts"] = self.eval_prompts.to_mapping() if self.eval_prompts else None
            core["eval"]["sets"] = {each.name: each.to_mapping() for each in self.eval_sets}
        core["hooks"].update(listed_mapping(self.hooks))
        core["logging"].update({DEFAULT_LOGGER: False} | listed_mapping(self.loggers))
        own = {name: getattr(self, name).to_mapping() for name in PLUGIN_SECTIONS}
        for section in ("prompts", "engine"):
            own[section] = {"name": own[section].pop("name"), **core.pop(section), **own[section]}
        order = ("model", "prompts", "eval", "algorithm", "optimizer", "strategy")
        rewards = [reward.to_mapping() for reward in self.rewards]
        full = {**core, **own, "rewards": rewards}
        if self.environment is not None:
            full[ENVIRONMENT_SECTION] = self.environment.to_mapping()
        return {key: full[key] for key in (*order, "rewards", "reward_scaling", "engine", "transport", *full)}
