"""Differences between two run files, and what they mean for a resumed run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .load import PLUGIN_SECTIONS, expand
from .problems import models_in
from .sections import RunConfig
from .select import CORE_OPTIONS, DEFAULT_PLUGINS, section_models

_DEFAULTS = {f"{section}.name": name for section, name in DEFAULT_PLUGINS.items()}
"""Of a section that a run folder of an earlier version lacks."""


@dataclass(frozen=True, slots=True)
class Change:
    """One changed option."""

    key: str
    before: Any
    after: Any
    """None where the option is absent."""
    why: str | None = None
    """The reason, if a section adapted itself to the run."""

    @property
    def meaning(self) -> str:
        """The reason or, for a run resumed from a checkpoint, the effect of the change."""
        return self.why or _effect(self.key)

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.after!r} ({self.meaning})"

    def to_json(self) -> dict[str, Any]:
        """The change as JSON, for the manifest."""
        return {"key": self.key, "before": self.before, "after": self.after, "meaning": self.meaning}


def config_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Options that differ between two resolved run files, in the order of the newer one."""
    return option_changes(*({**_DEFAULTS, **dict(_leaves(expand(run)))} for run in (before, after)))


def option_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Options that differ between two versions of one section, or of a run, in the order of the newer one."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    keys = [*new, *(key for key in old if key not in new)]
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def _effect(key: str) -> str:
    core = {name: model for name, field in RunConfig.model_fields.items() for model in models_in(field.annotation)}
    shared = {section: CORE_OPTIONS[kind] for section, kind in PLUGIN_SECTIONS.items() if kind in CORE_OPTIONS}
    models: dict[str, Any] = {"": RunConfig, **core, **shared, **section_models()}
    section = max((name for name in models if f"{key}.".startswith(f"{name}." if name else "")), key=len)
    option = key.removeprefix(f"{section}.") if section else key.partition(".")[0]
    if (instead := models[section].removed.get(option)) is not None:
        return f"an option no more: {instead}"
    effects: Mapping[str, str] = models[section].change_effects
    return effects.get(option) or effects.get("") or "holds from here on"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{index}")
    else:
        yield path, value
