"""A run with nothing left open, as transports and plugins get it, and the plugins that it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import BaseModel

from ..plugins.discovery import Selected
from ..types import SamplingParams
from .load import ENVIRONMENT_SECTION, PLUGIN_SECTIONS
from .section import OwnProcesses, TransportConfig, commands_of, options_of
from .sections import DEFAULT_LOGGER, EnvironmentConfig, EvalSetOptions, RewardCallOptions, RunConfig


@dataclass(frozen=True)
class Configured(Selected):
    """A selected plugin with its checked options."""

    config: BaseModel = field(kw_only=True)

    @classmethod
    def of(cls, selected: Selected, config: BaseModel) -> Configured:
        """The plugin with these options."""
        return cls(**{each.name: getattr(selected, each.name) for each in fields(Selected)}, config=config)

    def to_mapping(self) -> dict[str, Any]:
        """Its section of the run file."""
        return {"name": self.name, **options_of(self.config)}


@dataclass(frozen=True, slots=True)
class SelectedReward:
    """One entry of `rewards`."""

    name: str
    """Its label: the name in metrics and samples, unique in the run."""
    weight: float
    call_options: RewardCallOptions
    selected: Configured

    @property
    def config(self) -> BaseModel:
        """Its own options."""
        return self.selected.config

    def to_mapping(self) -> dict[str, Any]:
        core = {"weight": self.weight, "label": self.name, **self.call_options.model_dump(mode="json")}
        return {"name": self.selected.name, **core, **options_of(self.config)}


@dataclass(frozen=True, slots=True)
class SelectedEnvironment:
    """The environment that the section `environment` names."""

    options: EnvironmentConfig
    """Those of core."""
    selected: Configured

    @property
    def isolate(self) -> bool:
        """Whether it is kept in a process of its own: as the run file says, or the environment where it does not."""
        given = self.options.isolate
        return self.selected.component.isolate if given is None else given

    @property
    def name(self) -> str:
        """Short, for errors: `./game.py:Game` is called Game."""
        return self.selected.name.rpartition(":")[2] or self.selected.name

    def to_mapping(self) -> dict[str, Any]:
        own = self.selected.to_mapping()
        core = {**self.options.model_dump(mode="json"), "isolate": self.isolate}
        return {"name": own.pop("name"), **core, **own}


@dataclass(frozen=True, slots=True)
class SelectedEvalSet:
    """One entry of `eval.sets`."""

    name: str
    options: EvalSetOptions
    prompts: Configured
    rewards: tuple[SelectedReward, ...] | None
    """None: those of the run."""

    def to_mapping(self) -> dict[str, Any]:
        rewards = None if self.rewards is None else [reward.to_mapping() for reward in self.rewards]
        return {**self.options.model_dump(mode="json"), "prompts": self.prompts.to_mapping(), "rewards": rewards}


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
        core["hooks"].update(_listed(self.hooks))
        core["logging"].update({DEFAULT_LOGGER: False} | _listed(self.loggers))
        own = {name: getattr(self, name).to_mapping() for name in PLUGIN_SECTIONS}
        for section in ("prompts", "engine"):
            own[section] = {"name": own[section].pop("name"), **core.pop(section), **own[section]}
        order = ("model", "prompts", "eval", "algorithm", "optimizer", "strategy")
        rewards = [reward.to_mapping() for reward in self.rewards]
        full = {**core, **own, "rewards": rewards}
        if self.environment is not None:
            full[ENVIRONMENT_SECTION] = self.environment.to_mapping()
        return {key: full[key] for key in (*order, "rewards", "reward_scaling", "engine", "transport", *full)}


def _listed(plugins: Sequence[Configured]) -> dict[str, Any]:
    """Their part of the section: `Selector.listed` of it gives them again."""
    return {each.name: options_of(each.config) or True for each in plugins}
