"""Options of the environment `several`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from rlhf_core.columns import Column, columns_of
from rlhf_core.config.load import OWN_REWARD, parse_reward
from rlhf_core.config.problems import Problem
from rlhf_core.config.section import Count, Section
from rlhf_core.config.sections import METRICS_OF_SCORE
from rlhf_core.config.select import check_options
from rlhf_core.errors import DataError, PluginError
from rlhf_core.plugins.selected import load
from rlhf_core.util.did_you_mean import suggestion

from .environment_shape import check_shape
from .section import EnvironmentConfig, EnvironmentPart

if TYPE_CHECKING:
    from rlhf_core.config.resolved import ResolvedRun
    from rlhf_core.plugins.selected import SelectedPlugin
    from rlhf_core.prompts.stream import PromptStream
    from rlhf_core.wiring.inputs import RunInputs

_LABEL = re.compile(r"[A-Za-z0-9][\w.-]*")
_RESERVED = frozenset({OWN_REWARD, *METRICS_OF_SCORE})
"""Names that rewards of a run cannot have either."""
_MAX_SHOWN = 5


class SeveralEntry(Section):
    """One environment of `several`. Other keys of the entry are options of the environment."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    name: str = Field(min_length=1, description="Name of an environment, or FILE.py:NAME.")
    share: float = Field(1.0, gt=0, description="Share of the prompts relative to the other shares. Not with `by`.")
    weight: float = Field(1.0, description="Factor of this environment's reward.")
    rewards: list[dict[str, Any]] = Field(
        default_factory=list,
        description="Rewards that are added to this environment's own reward, as in the section `rewards`.",
    )
    max_turns: Count | None = Field(None, description="null uses environment.max_turns.")
    max_tokens: Count | None = Field(None, description="null uses environment.max_tokens.")
    history: Literal["append", "branch"] | None = Field(None, description="null uses environment.history.")
    tool_format: str | None = Field(None, min_length=1, description="null uses environment.tool_format.")
    concurrency: Count | None = Field(
        None,
        description="Maximum number of episodes that each engine plays at once. null uses environment.concurrency.",
    )
    timeout_seconds: float | None = Field(None, gt=0, description="null uses environment.timeout_seconds.")
    retries: int | None = Field(None, ge=0, description="null uses environment.retries.")
    on_failure: Literal["fail", "zero", "drop"] | None = Field(None, description="null uses environment.on_failure.")
    isolate: bool | None = Field(
        None, description="null uses environment.isolate, or if that is null the environment's default."
    )
    memory_limit_bytes: Count | None = Field(None, description="null uses environment.memory_limit_bytes.")
    options: dict[str, Any] = Field({}, description="Options of the environment. They may also be next to its name.")

    @field_validator("rewards", mode="before")
    @classmethod
    def _expand_rewards(cls, rewards: Any) -> Any:
        if not isinstance(rewards, list):
            return rewards
        return [parse_reward(each) if isinstance(each, str) else each for each in rewards]

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, entry: Any) -> Any:
        if isinstance(entry, str):
            return {"name": entry}
        if not isinstance(entry, dict):
            return entry
        extra = {key: value for key, value in entry.items() if key not in cls.model_fields}
        rest = {key: value for key, value in entry.items() if key in cls.model_fields}
        options = rest.get("options", {})
        return {**rest, "options": {**options, **extra}} if isinstance(options, dict) else entry


_INHERITED = tuple(EnvironmentConfig.model_fields.keys() & SeveralEntry.model_fields.keys() - {"weight"})


class SeveralConfig(EnvironmentConfig):
    """Options of the environment `several`. Those of any environment are the defaults of all of `of`."""

    columns: ClassVar[Mapping[str, Column]] = {}
    """The section `environment`, which selects this environment, declares the columns of episodes."""

    of: dict[str, SeveralEntry] = Field(
        min_length=1, description="Environments by a name of your choice, which is their name in metrics."
    )
    by: str | None = Field(
        None,
        min_length=1,
        description="Key of the prompts' records with the name (in `of`) of the environment that plays the prompt. "
        "null assigns prompts by share.",
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        for label, entry in self.of.items():
            if not _LABEL.fullmatch(label):
                raise ValueError(f"of: {label!r}: a name has letters, digits, . _ and -")
            if self.by is not None and "share" in entry.model_fields_set and entry.share != 1.0:
                raise ValueError(f"of: {label}: remove its share: with `by` the records select the environment")
        return self

    def with_plugin(self, plugin: SelectedPlugin) -> Self:
        return self  # each environment has its own default of `isolate`

    def selections(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        for label, entry in self.of.items():
            yield "environments", f"of.{label}", {**entry.options, "name": entry.name}
            for place, reward in enumerate(entry.rewards):
                yield "rewards", f"of.{label}.rewards.{place}", reward

    def with_selections(self, selected: Sequence[Mapping[str, Any]]) -> Self:
        found = iter(selected)
        entries = {}
        for label, entry in self.of.items():
            values = next(found)
            update = {
                "name": values["name"],
                "options": {key: values[key] for key in entry.options},
                "rewards": [dict(next(found)) for _ in entry.rewards],
            }
            entries[label] = entry.model_copy(update=update)
        return self.model_copy(update={"of": entries})

    def parts(self) -> dict[str, EnvironmentPart]:
        return {
            label: EnvironmentPart(section=self._section_of(entry), weight=entry.weight, rewards=entry.rewards)
            for label, entry in self.of.items()
        }

    def _section_of(self, entry: SeveralEntry) -> dict[str, Any]:
        own = {key: getattr(entry, key) for key in _INHERITED}
        shared = {key: getattr(self, key) if value is None else value for key, value in own.items()}
        return {
            **{key: value for key, value in shared.items() if value is not None},
            **entry.options,
            "name": entry.name,
        }

    def for_one_turn(self) -> Self:
        entries = {label: entry.model_copy(update={"max_turns": 1}) for label, entry in self.of.items()}
        return self.model_copy(update={"max_turns": 1, "of": entries})

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        for label, entry in self.of.items():
            names = [reward.get("label") or reward.get("name") for reward in entry.rewards]
            if twice := next((name for name in names if names.count(name) > 1), None):
                yield Problem(f"of.{label}.rewards", f'two rewards are named "{twice}": set a `label` for one of them')
            if reserved := next((name for name in names if name in _RESERVED), None):
                yield Problem(f"of.{label}.rewards", f'"{reserved}" is a reserved name: set another `label`')
            try:
                plugin = load("environments", entry.name, trust=run.trust)
            except PluginError:
                continue  # reported when it was selected
            for key in entry.options.keys() - plugin.component.config.model_fields.keys():
                if not plugin.is_unread and (near := suggestion(key, SeveralEntry.model_fields)):
                    yield Problem(f"of.{label}.{key}", f"is not an option of an environment in `of`{near}")
            try:
                yield from self._problems_of(plugin, f"of.{label}.name")
            except PluginError as error:
                yield Problem(f"of.{label}.name", error.message, error.hint)

    def _problems_of(self, plugin: SelectedPlugin, place: str) -> Iterator[Problem]:
        """Yield problems of an environment, or raise `PluginError` if it is broken."""
        config = plugin.component.config
        if issubclass(config, SeveralConfig):
            yield Problem(place, "is several, which cannot be nested: list its environments here")
            return
        check_options(plugin, EnvironmentConfig)
        if isinstance(plugin.function, type):
            check_shape(plugin.function, plugin.label)
        if columns := sorted(columns_of(plugin.function or config).keys() - EnvironmentConfig.columns.keys()):
            yield Problem(place, f"declares the column {columns[0]}, which is not supported with several environments")

    def check_inputs(self, inputs: RunInputs) -> None:
        from rlhf_episodes.chat import chat_format

        forms = {(entry.tool_format or self.tool_format, entry.history or self.history) for entry in self.of.values()}
        for tool_format, history in sorted(forms):
            chat_format(inputs.tokenizer, tool_format=tool_format, history=history)
        if self.by is not None:
            for stream in (inputs.prompts, *inputs.eval_prompts.values()):
                self._check_records(stream, self.by)

    def _check_records(self, stream: PromptStream, key: str) -> None:
        """Raise `DataError` for records without the key or with an unknown environment. Streamed ones are not read."""
        label_of = import_module("rlhf_episodes.several").label_of
        wrong: list[DataError] = []
        training = (stream.at_index(index) for index in stream.training or ())
        for record, name in (*stream.held_out(), *training) if stream.training is not None else ():
            try:
                label_of(record, key, list(self.of), name)
            except DataError as error:
                wrong.append(error)
        if len(wrong) == 1:
            raise wrong[0]
        if wrong:
            shown = "".join(f"\n  {error.where}: {error.message}" for error in wrong[:_MAX_SHOWN])
            more = f"\n  and {len(wrong) - _MAX_SHOWN} more" if len(wrong) > _MAX_SHOWN else ""
            raise DataError(f"{len(wrong)} records are wrong:{shown}{more}", where="prompts", hint=wrong[0].hint)
