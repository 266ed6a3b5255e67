"""Checks and adapts the sections of a run to the rest of it, and compares two run files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import PluginError
from ..plugins.errors_of import errors_of
from ..util.redact import redact_mapping
from .load import expand
from .problems import Problem, Problems
from .resolved import INVALID, ReadsInvalid, ResolvedRun
from .section import Section, options_of
from .select import DEFAULT_PLUGINS

_DEFAULTS: dict[str, Any] = {f"{section}.name": name for section, name in DEFAULT_PLUGINS.items()}
_DEFAULTS |= {"model.lora.rslora": False, "model.lora.dora": False, "model.lora.init": "default"}
"""Options that a run folder of an earlier version may lack -> their values in that version."""


@dataclass(frozen=True, slots=True)
class Change:
    """One changed option."""

    key: str
    before: Any
    after: Any
    """None if the option is missing."""
    why: str | None = None
    """The reason, if a section adapted itself to the run."""

    def __str__(self) -> str:
        text = f"{self.key}: {self.before!r} -> {self.after!r}"
        return text if self.why is None else f"{text} ({self.why})"

    def to_json(self) -> dict[str, Any]:
        """Return the change as JSON values, for the manifest."""
        return {"key": self.key, "before": self.before, "after": self.after}


def config_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return the options that differ between two resolved run files, in the order of the newer one."""
    return option_changes(*({**_DEFAULTS, **dict(_leaves(expand(run)))} for run in (before, after)))


def option_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return the options that differ between two versions of a section or run, in the order of the newer one."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    keys = [*new, *(key for key in old if key not in new)]
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of every option. Lists of mappings are numbered."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{index}")
    else:
        yield path, value


def check_sections(run: ResolvedRun, problems: Problems) -> None:
    """Add the problems that each valid section of the run reports."""
    core = () if run.run is INVALID else ((name, part, "rlhf-core") for name, part in run.run)
    for place, options, owner in [*core, *((each.place, each.config, each.label) for each in run.plugins)]:
        if not isinstance(options, Section):
            continue
        try:
            with errors_of(owner, f"checking the section {place}", kind=PluginError):
                for each in _problems_of(options, run):
                    problems.add(".".join(filter(None, (place, each.path))), each.message, each.hint)
        except ReadsInvalid:
            pass  # the invalid section that it reads is reported already
        except PluginError as error:
            problems.add_error(place, error)


def _problems_of(section: Section, run: ResolvedRun) -> Iterator[Problem]:
    """Yield the problems from `check` of its class and of each base, so that a subclass cannot skip core's checks."""
    for owner in type(section).__mro__:
        if "check" in vars(owner):
            yield from owner.check(section, run)  # type: ignore[attr-defined]


def adapt_sections(run: ResolvedRun) -> ResolvedRun:
    """Return the run with each section adapted to it. Raises `PluginError` if a section cannot be adapted."""
    changes: list[Change] = []

    def adapt(options: Any, place: str, owner: str) -> Any:
        if not isinstance(options, Section):
            return options
        with errors_of(owner, f"checking the section {place}", kind=PluginError):
            adapted = options.adapt(run)
            before, after = redact_mapping(options_of(options)), redact_mapping(options_of(adapted))
        reasons = options.adapt_reasons
        for each in option_changes(before, after):
            why = reasons.get(each.key.partition(".")[0]) or reasons.get("", "to fit the rest of the run")
            changes.append(replace(each, key=f"{place}.{each.key}", why=why))
        return adapted

    core = run.run.model_copy(update={name: adapt(part, name, "rlhf-core") for name, part in run.run})
    adapted = run.map_plugins(lambda each: replace(each, config=adapt(each.config, each.place, each.label)))
    return replace(adapted, run=core, adapted=changes)
