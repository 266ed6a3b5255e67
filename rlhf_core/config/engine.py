"""The section `engine`, as far as core reads it: how answers are sampled, and the options of every request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, JsonValue

from ..columns import Column
from ..types import SamplingParams
from .problems import Problem
from .section import Count, Section

if TYPE_CHECKING:
    from .resolved import ResolvedRun


class EngineConfig(Section):
    """Options every engine has; the config of an engine may subclass this."""

    change_effects: ClassVar[Mapping[str, str]] = {"": "answers are sampled otherwise from the next episode on"}

    max_new_tokens: Count = Field(128, description="Longest answer, in tokens.")
    temperature: float = Field(1.0, gt=0, description="Softmax temperature of sampling.")
    top_k: int = Field(0, ge=0, description="Sample from the k likeliest tokens only; 0 is off.")
    top_p: float = Field(1.0, gt=0, le=1, description="Sample from the smallest set with this probability; 1 is off.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="Texts that end an answer, besides the end-of-sequence token."
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict, description="Options of every request, by the names that the engine accepts."
    )

    request_options: ClassVar[Mapping[str, str]] = {}
    """Option of a request that the engine accepts -> what it does."""
    columns: ClassVar[Mapping[str, Column]] = {}
    """The columns that the engine's completions may have, besides core's `temperature`."""

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        accepted: Mapping[str, str] = getattr(run.engine.config, "request_options", {})
        for name in self.options:
            if name in EngineConfig.model_fields:
                yield Problem(f"options.{name}", "is an option of the section", f"set engine.{name}")
            elif name not in accepted:
                problem = f"the engine {run.engine.name} does not accept this request option"
                yield Problem(f"options.{name}", problem, f"it accepts {', '.join(accepted) or 'none'}")

    def sampling(self) -> SamplingParams:
        """How rollouts of the run are sampled."""
        options = {name: getattr(self, name) for name in EngineConfig.model_fields}
        return SamplingParams(**{**options, "stop": tuple(self.stop)})
