"""The resolved run, as transports and plugins get it, and its plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import BaseModel

from ..columns import Column, columns_of
from ..plugins.selected import SelectedPlugin
from ..plugins.trust import EVERY_FILE, FileTrust
from ..types import SamplingParams
from .load import OWN_REWARD, PLUGIN_SECTIONS
from .processes import OwnProcesses, TransportConfig
from .section import Section, options_of
from .sections import DEFAULT_LOGGER, EngineConfig, EvalSetOptions, RewardEntry, RunConfig

if TYPE_CHECKING:
    from .fitting import Change

OptionsT = TypeVar("OptionsT", bound=BaseModel)


class ReadsInvalid(BaseException):
    """Raised if a check reads an invalid section. Not an `Exception`, so that a check does not catch it by accident."""


class _Invalid:
    """Placeholder for an invalid section while the other sections are checked. Reading any of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise ReadsInvalid

    def __iter__(self) -> Iterator[Any]:
        raise ReadsInvalid

    def __bool__(self) -> bool:
        raise ReadsInvalid


INVALID: Any = _Invalid()


@dataclass(frozen=True)
class Configured(SelectedPlugin):
    """A selected plugin with its checked options."""

    config: BaseModel = field(kw_only=True)
    """Its own options, with those that core or a section adds to them."""
    place: str = field(default="", kw_only=True)
    """Place in the run file, such as `rewards.0`."""
    section: SelectedPlugin | None = field(default=None, kw_only=True)
    """The plugin's section that selects it (`Section.selects`)."""

    @classmethod
    def of(cls, selected: SelectedPlugin, config: BaseModel, place: str = "") -> Self:
        """Return the selected plugin with these options."""
        return cls(**vars(selected), config=config, place=place)

    def typed(self, model: type[OptionsT]) -> OptionsT:
        """Return its options, typed as the class that all plugins of its kind share."""
        assert isinstance(self.config, model)
        return self.config

    @property
    def columns(self) -> Mapping[str, Column]:
        """Columns that its config class declares or, for a class without a component, that class."""
        return columns_of(self.function or self.component.config)

    def to_mapping(self) -> dict[str, Any]:
        """Return its section of the run file."""
        options = options_of(self.config)
        return options if self.kind == "sections" else {"name": self.name, **options}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """A checked run: the core sections typed, every plugin selected and configured."""

    run: RunConfig
    algorithm: Configured
    strategy: Configured
    engine: Configured
    transport: Configured
    prompts: Configured
    optimizer: Configured
    schedule: Configured
    """Schedule of the learning rate: `optimizer.schedule`."""
    rewards: tuple[Configured, ...]
    eval_prompts: Mapping[str | None, Configured] = field(default_factory=dict)
    """Set of `eval.sets`, or None for the section `eval` itself -> its source, if that is not `prompts`."""
    eval_rewards: Mapping[str, tuple[Configured, ...]] = field(default_factory=dict)
    """Set of `eval.sets` -> its rewards, if they are not those of the run."""
    hooks: tuple[Configured, ...] = ()
    """Hook plugins with options that the run lists."""
    loggers: tuple[Configured, ...] = ()
    """Further destinations of the metrics, besides `metrics.jsonl`."""
    sections: Mapping[str, Configured] = field(default_factory=dict)
    """Dotted name -> each active section of a plugin, or the plugin that it selects."""
    trust: FileTrust = field(default=EVERY_FILE, compare=False)
    """Which files and programs that the run names may be executed."""
    adapted: Sequence[Change] = field(default_factory=list, compare=False)
    """Options that sections changed to fit this run."""

    def section(self, name: str) -> Any:
        """Return the options of a plugin's section, a `Section`, or None if the run does not have it."""
        section = self.sections.get(name)
        return None if section is None else section.config

    def map_plugins(self, change: Callable[[Configured], Configured]) -> Self:
        """Return the run with `change` applied to each plugin that it names and each section of a plugin.

        Plugins that are named by options of other plugins are not included.
        """

        def changed(part: Any) -> Any:
            if isinstance(part, dict):
                return {name: changed(each) for name, each in part.items()}
            if isinstance(part, tuple):
                return tuple(map(changed, part))
            return change(part) if isinstance(part, Configured) else part

        return replace(self, **{each.name: changed(getattr(self, each.name)) for each in fields(self)})

    @property
    def plugins(self) -> Sequence[Configured]:
        """All plugins that `map_plugins` changes."""
        plugins: list[Configured] = []

        def note(plugin: Configured) -> Configured:
            plugins.append(plugin)
            return plugin

        self.map_plugins(note)
        return plugins

    @property
    def selected(self) -> Sequence[SelectedPlugin]:
        """`plugins`, and the sections that select some of them."""
        return [*self.plugins, *(each.section for each in self.plugins if each.section is not None)]

    @property
    def player_sections(self) -> Iterator[tuple[str, Section, str]]:
        """Name, options and owner of the sections that may provide a player, innermost first, else by name.

        A section whose player gives a reward plays by itself, so it is the innermost.
        """
        for name in sorted(self.sections, key=lambda each: (self._weight_of(each) is None, each)):
            yield name, self.section(name), self.sections[name].label

    def _weight_of(self, section: str) -> float | None:
        return self.sections[section].typed(Section).reward_weight()

    @property
    def row_columns(self) -> Iterator[tuple[str, Mapping[str, Column]]]:
        """Owner and columns of everything that adds columns to rows of answers: sections and plugins they select."""
        for section in self.sections.values():
            yield section.label, section.columns
            if section.section is not None:
                yield section.section.label, columns_of(section.section.component.config)

    @property
    def reward_weights(self) -> dict[str, float]:
        """Name of each reward -> its weight in the combined score. The reward of a section's player comes first."""
        player_weights = [weight for name in self.sections if (weight := self._weight_of(name)) is not None]
        return ({OWN_REWARD: player_weights[0]} if player_weights else {}) | weights_of(self.rewards)

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of rollouts."""
        return self.engine.typed(EngineConfig).sampling()

    @property
    def own_processes(self) -> OwnProcesses | None:
        """Processes that the transport starts itself, None if it does not start any."""
        return self.transport.typed(TransportConfig).own_processes()

    @property
    def rolls_out(self) -> bool:
        """Whether the run samples answers to learn from."""
        return self.algorithm.component.feeds == "rollouts"

    @property
    def evaluation_sets(self) -> tuple[tuple[str | None, EvalSetOptions], ...]:
        """Name and options of each set that is answered and judged, in order. The section `eval` has the name None."""
        options = self.run.eval
        if options is None:
            return ()
        answers_own = options.num_prompts > 0 and bool(self.reward_weights)
        return (*([(None, options)] if answers_own else ()), *options.sets.items())

    @property
    def measures_eval_records(self) -> bool:
        """Whether `eval.prompts` contains dataset records to measure, not prompts to answer."""
        return None in self.eval_prompts and not self.rolls_out and not self.reward_weights

    @property
    def generates(self) -> bool:
        """Whether the run needs an engine."""
        return self.rolls_out or bool(self.evaluation_sets)

    def to_mapping(self) -> dict[str, Any]:
        """Return the whole run as JSON values. `resolve` of the result returns an equal run."""
        core = self.run.model_dump(mode="json")
        if core["eval"] is not None:
            sets = {None: core["eval"], **core["eval"]["sets"]}
            for name, source in self.eval_prompts.items():
                sets[name]["prompts"] = source.to_mapping()
            for name, judges in self.eval_rewards.items():
                sets[name]["rewards"] = [reward.to_mapping() for reward in judges]
        core["hooks"].update(_listed(self.hooks))
        core["logging"].update({DEFAULT_LOGGER: False} | _listed(self.loggers))
        own = {name: getattr(self, name).to_mapping() for name in PLUGIN_SECTIONS}
        own["optimizer"]["schedule"] = self.schedule.to_mapping()
        order = ("model", "prompts", "eval", "algorithm", "optimizer", "strategy")
        full = {**core, **own, "rewards": [reward.to_mapping() for reward in self.rewards]}
        ordered = {key: full[key] for key in (*order, "rewards", "reward_scaling", "engine", "transport", *full)}
        for name, section in self.sections.items():
            _put(ordered, name, section.to_mapping())
        return ordered


def weights_of(rewards: Iterable[Configured]) -> dict[str, float]:
    """Return label -> weight of each reward."""
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


def _listed(plugins: Sequence[Configured]) -> dict[str, Any]:
    """Return their part of the section, from which `Selector.listed` selects them again."""
    return {each.name: options_of(each.config) or True for each in plugins}
