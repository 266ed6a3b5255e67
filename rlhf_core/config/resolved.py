"""A run with nothing left open, as transports and plugins get it, and the plugins that it names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import BaseModel

from ..columns import Column, columns_of
from ..plugins.selected import Selected
from ..plugins.trust import EVERY_FILE, FileTrust
from ..types import SamplingParams
from .load import OWN_REWARD, PLUGIN_SECTIONS
from .processes import OwnProcesses, TransportConfig
from .section import Section, options_of
from .sections import DEFAULT_LOGGER, EngineConfig, EvalSetOptions, RewardEntry, RunConfig

if TYPE_CHECKING:
    from .fitting import Change

ValueT = TypeVar("ValueT")
OptionsT = TypeVar("OptionsT", bound=BaseModel)


class ReadsInvalid(BaseException):
    """A check reads a section that has problems of its own. No `Exception`, so that no check catches it."""


class _Invalid:
    """Stands for a section that has problems while the other sections are checked; nothing of it can be read."""

    def __getattr__(self, name: str) -> Any:
        raise ReadsInvalid

    def __iter__(self) -> Iterator[Any]:
        raise ReadsInvalid

    def __bool__(self) -> bool:
        raise ReadsInvalid


INVALID: Any = _Invalid()


@dataclass(frozen=True)
class Configured(Selected):
    """A selected plugin with its checked options."""

    config: BaseModel = field(kw_only=True)
    """Its own options, with those of core or of a section that stand beside them."""
    section: Selected | None = field(default=None, kw_only=True)
    """The section of a plugin that selects it (`Section.selects`)."""

    @classmethod
    def of(cls, selected: Selected, config: BaseModel) -> Self:
        """The plugin with these options."""
        return cls(**{each.name: getattr(selected, each.name) for each in fields(Selected)}, config=config)

    def typed(self, model: type[OptionsT]) -> OptionsT:
        """Its options, as those of the class that all plugins of its kind have."""
        assert isinstance(self.config, model)
        return self.config

    @property
    def columns(self) -> Mapping[str, Column]:
        """Those that its config class declares, or, for a class without a component, that class."""
        return columns_of(self.function or self.component.config)

    def to_mapping(self) -> dict[str, Any]:
        """Its section of the run file."""
        options = options_of(self.config)
        return options if self.kind == "sections" else {"name": self.name, **options}


@dataclass(frozen=True, slots=True)
class SelectedEvalSet:
    """One entry of `eval.sets`."""

    name: str
    options: EvalSetOptions
    prompts: Configured
    rewards: tuple[Configured, ...] | None
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
    optimizer: Configured
    schedule: Configured
    """Of the learning rate: `optimizer.schedule`."""
    eval_prompts: Configured | None
    """Another source for evaluation; None holds prompts of `prompts` out."""
    rewards: tuple[Configured, ...]
    eval_sets: tuple[SelectedEvalSet, ...] = ()
    """Sets beside that of the section `eval` itself."""
    hooks: tuple[Configured, ...] = ()
    """Hook plugins with options that the run lists."""
    loggers: tuple[Configured, ...] = ()
    """Where the metrics go, beside `metrics.jsonl`."""
    sections: Mapping[str, Configured] = field(default_factory=dict)
    """Dotted name -> each active section that a plugin brings, or the plugin that it selects."""
    trust: FileTrust = field(default=EVERY_FILE, compare=False)
    """Which files and programs that the run names may be run."""
    commands: frozenset[tuple[str, ...]] = frozenset()
    """The programs, with their arguments, that options of its plugins name."""
    adapted: Sequence[Change] = field(default_factory=list, compare=False)
    """The options that sections changed to fit this run."""

    def section(self, name: str) -> Any:
        """The options of a section that a plugin brings, a `Section`; None if the run does not have it."""
        found = self.sections.get(name)
        return None if found is None else found.config

    @property
    def selected(self) -> Iterator[Selected]:
        """Every plugin that the run names and every section of a plugin, not those that options of these name."""
        yield from (self.algorithm, self.strategy, self.engine, self.transport, self.prompts, self.optimizer)
        yield self.schedule
        yield from (*self.rewards, *(reward for each in self.eval_sets for reward in each.rewards or ()))
        yield from (each for each in (self.eval_prompts, *(own.prompts for own in self.eval_sets)) if each is not None)
        yield from (*self.hooks, *self.loggers, *self.sections.values())
        yield from (each.section for each in self.sections.values() if each.section is not None)

    @property
    def player_sections(self) -> Iterator[tuple[str, Section, str]]:
        """Name, options and owner of the sections that may bring a player, by name, innermost first.

        One whose player gives a reward plays by itself, so it is the innermost.
        """
        for name in sorted(self.sections, key=lambda each: (self._weight_of(each) is None, each)):
            yield name, self.section(name), self.sections[name].label

    def _weight_of(self, section: str) -> float | None:
        return self.sections[section].typed(Section).reward_weight()

    @property
    def row_columns(self) -> Iterator[tuple[str, Mapping[str, Column]]]:
        """Owner and columns of what adds columns to the rows of answers: sections, and the plugins they select."""
        for brought in self.sections.values():
            yield brought.label, brought.columns
            if brought.section is not None:
                yield brought.section.label, columns_of(brought.section.component.config)

    @property
    def reward_weights(self) -> dict[str, float]:
        """Name of each reward -> its weight in the combined score; that of a section's player comes first."""
        own = [weight for name in self.sections if (weight := self._weight_of(name)) is not None]
        return ({OWN_REWARD: own[0]} if own else {}) | weights_of(self.rewards)

    @property
    def sampling(self) -> SamplingParams:
        """How rollouts are sampled."""
        return self.engine.typed(EngineConfig).sampling()

    @property
    def own_processes(self) -> OwnProcesses | None:
        """Those that the transport starts itself."""
        return self.transport.typed(TransportConfig).own_processes()

    @property
    def updates_in_flight(self) -> bool:
        """Whether new weights come while answers are sampled."""
        return self.transport.typed(TransportConfig).updates_in_flight()

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

    def to_mapping(self) -> dict[str, Any]:
        """The whole run as JSON values; `resolve` of it gives the same run again."""
        core = self.run.model_dump(mode="json")
        if core["eval"] is not None:
            core["eval"]["prompts"] = self.eval_prompts.to_mapping() if self.eval_prompts else None
            core["eval"]["sets"] = {each.name: each.to_mapping() for each in self.eval_sets}
        core["hooks"].update(_listed(self.hooks))
        core["logging"].update({DEFAULT_LOGGER: False} | _listed(self.loggers))
        own = {name: getattr(self, name).to_mapping() for name in PLUGIN_SECTIONS}
        own["optimizer"]["schedule"] = self.schedule.to_mapping()
        order = ("model", "prompts", "eval", "algorithm", "optimizer", "strategy")
        rewards = [reward.to_mapping() for reward in self.rewards]
        full = {**core, **own, "rewards": rewards}
        ordered = {key: full[key] for key in (*order, "rewards", "reward_scaling", "engine", "transport", *full)}
        for name, brought in self.sections.items():
            _put(ordered, name, brought.to_mapping())
        return ordered


def weights_of(rewards: Iterable[Configured]) -> dict[str, float]:
    """Label of each reward -> its weight."""
    entries = [each.typed(RewardEntry) for each in rewards]
    return {str(entry.label): entry.weight for entry in entries}


def _put(run: dict[str, Any], name: str, options: Mapping[str, Any]) -> None:
    """Add a section to a resolved run file, unless the section around it is off."""
    *parents, last = name.split(".")
    place: Any = run
    for part in parents:
        place = place.get(part) if isinstance(place, dict) else None
    if isinstance(place, dict):
        place[last] = options


_PLACES = {"run": "", "sections": "", "options": ""} | {
    "eval_prompts": "eval.prompts",
    "eval_sets": "eval.sets",
    "loggers": "logging",
    "schedule": "optimizer.schedule",
}
"""Field -> its place in the run file, if that has another name."""


def map_options(value: ValueT, change: Callable[[str, BaseModel, str], BaseModel], place: str = "") -> ValueT:
    """A resolved run, or a part of one, with `change(place, options, owner)` as the options of each section.

    These are core's sections and the options of plugins; parts that are `INVALID` stay as they are.
    """

    def inner(name: str, part: Any) -> Any:
        return map_options(part, change, ".".join(filter(None, (place, name))))

    mapped: Any = value
    if isinstance(value, Configured):
        mapped = replace(value, config=change(place, value.config, value.label))
    elif isinstance(value, RunConfig):
        mapped = value.model_copy(update={name: inner(name, each) for name, each in value})
    elif isinstance(value, BaseModel):
        mapped = change(place, value, "rlhf-core")
    elif isinstance(value, tuple):
        keys = [
            str(index) if getattr(each, "kind", None) == "rewards" else each.name for index, each in enumerate(value)
        ]
        mapped = tuple(map(inner, keys, value))
    elif isinstance(value, dict):
        mapped = {name: inner(name, each) for name, each in value.items()}
    elif isinstance(value, ResolvedRun | SelectedEvalSet):
        parts = {each.name: getattr(value, each.name) for each in fields(value)}
        mapped = replace(value, **{name: inner(_PLACES.get(name, name), part) for name, part in parts.items()})
    return mapped  # type: ignore[no-any-return]


def _listed(plugins: Sequence[Configured]) -> dict[str, Any]:
    """Their part of the section: `Selector.listed` of it gives them again."""
    return {each.name: options_of(each.config) or True for each in plugins}
