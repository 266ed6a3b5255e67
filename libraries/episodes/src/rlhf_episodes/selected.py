"""The environment of a run: the options of its section, and the plugin that the section names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from rlhf_core.columns import Column
from rlhf_core.config.problems import Problems
from rlhf_core.config.resolve import resolve_section
from rlhf_core.config.resolved import Configured, ResolvedRun, SelectedSection
from rlhf_core.plugins.trust import EVERY_FILE, FileTrust

from .section import EnvironmentConfig

SECTION = "environment"


@dataclass(frozen=True, slots=True)
class SelectedEnvironment:
    """The environment that the section `environment` names."""

    options: EnvironmentConfig
    """Those of the section itself."""
    selected: Configured

    @classmethod
    def of(cls, section: SelectedSection) -> SelectedEnvironment:
        """The environment of a resolved section."""
        return cls(cast(EnvironmentConfig, section.config), cast(Configured, section.plugin))

    @classmethod
    def of_run(cls, run: ResolvedRun) -> SelectedEnvironment | None:
        """The environment of a run; None if it has none."""
        return cls.of(run.sections[SECTION]) if SECTION in run.sections else None

    @property
    def isolate(self) -> bool:
        """Whether it is kept in a process of its own, as `EnvironmentConfig.with_plugin` has settled it."""
        return bool(self.options.isolate)

    @property
    def name(self) -> str:
        """Short, for errors: `./game.py:Game` is called Game."""
        return self.selected.name.rpartition(":")[2] or self.selected.name

    @property
    def columns(self) -> Mapping[str, Column]:
        """Those that the environment declares."""
        return self.selected.columns


def resolve_environment(data: Any, problems: Problems, trust: FileTrust = EVERY_FILE) -> SelectedEnvironment | None:
    """The section `environment`, checked; None, and problems noted, where it is wrong."""
    section = resolve_section(SECTION, data, problems, trust)
    return None if section is None else SelectedEnvironment.of(section)
