"""The plugins that a run file names, imported and with checked options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from ..plugins.discovery import Selected
from .section import options_of
from .sections import EnvironmentConfig, EvalSetOptions, RewardCallOptions


@dataclass(frozen=True)
class Configured(Selected):
    """A selected plugin with its checked options."""

    config: BaseModel = field(kw_only=True)

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
    config: BaseModel

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
