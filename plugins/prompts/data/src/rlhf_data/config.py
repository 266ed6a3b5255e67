"""Options of the prompt sources, and the section `prompts.curriculum`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import ConfigDict, Field, field_validator, model_validator

from rlhf_core import Section
from rlhf_core.config import Problem, PromptsConfig
from rlhf_core.util import suggestion

if TYPE_CHECKING:
    from rlhf_core.config import ResolvedRun
    from rlhf_core.prompts import PromptStream
    from rlhf_core.protocols import Sampler

Count = Annotated[int, Field(ge=1)]
SuccessRange = tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0, le=1)]]


class HfDatasetConfig(PromptsConfig):
    """A dataset on disk or on the Hugging Face hub."""

    path: str = Field(
        min_length=1,
        description="A folder (of `save_to_disk`, or of data files), a .parquet, .jsonl or .csv file, or a hub name.",
    )
    split: str = Field("train", min_length=1, description="Which split, where the dataset has several.")
    subset: str | None = Field(None, description="Configuration of a hub dataset that has several.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub dataset; null takes the newest.")
    streaming: bool = Field(
        False, description="Read a hub dataset as it is drawn, in its own order, in place of loading it whole."
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Our key -> the dataset's column, such as {prompt: question, answer: solution}.",
    )


class MixtureEntry(Section):
    """One source of a mixture; what else stands here are the source's own options."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    name: str = Field(min_length=1, description="A prompt source.")
    label: str | None = Field(None, min_length=1, description="How it is called; null takes its name.")
    weight: float = Field(1.0, gt=0, description="Share of the stream, beside the other weights.")
    options: dict[str, Any] = Field({}, description="Those of the source; they may stand beside its name.")

    @property
    def known_as(self) -> str:
        """Its `source` in a record; `./mine.py:lines` is called lines."""
        return self.label or self.name.rpartition(":")[2]

    @field_validator("options")
    @classmethod
    def _own_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        if shared := sorted(options.keys() & PromptsConfig.model_fields.keys()):
            raise ValueError(f"{', '.join(shared)} of a source is that of the whole mixture: set it beside `sources`")
        return options

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        own = {key: value for key, value in given.items() if key not in cls.model_fields}
        rest = {key: value for key, value in given.items() if key in cls.model_fields}
        options = rest.get("options", {})
        return {**rest, "options": {**options, **own}} if isinstance(options, dict) else given


class MixtureConfig(PromptsConfig):
    """Several sources, mixed by weights; a record's `source` is the label of its own."""

    sources: list[MixtureEntry] = Field(
        min_length=1, description="What is mixed: name, label, weight, and the options of each."
    )

    @field_validator("sources")
    @classmethod
    def _told_apart(cls, sources: list[MixtureEntry]) -> list[MixtureEntry]:
        names = [entry.known_as for entry in sources]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f'two sources are called "{twice[0]}": give one a `label`')
        return sources

    def selections(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for place, entry in enumerate(self.sources):
            yield "prompts", f"sources.{place}", {**entry.options, "name": entry.name}

    def with_selections(self, selected: Sequence[Mapping[str, Any]]) -> MixtureConfig:
        sources = [
            entry.model_copy(update={"name": found["name"], "options": {key: found[key] for key in entry.options}})
            for entry, found in zip(self.sources, selected, strict=True)
        ]
        return self.model_copy(update={"sources": sources})


class SortDigitsConfig(PromptsConfig):
    """Problems like `31415926>`, whose answer is the digits in ascending order."""

    num_digits: int = Field(8, ge=1, le=64, description="Digits of each problem.")
    size: int = Field(100_000, ge=1, description="How many different problems.")
    problem_seed: int = Field(0, ge=0, description="Which problems; independent of the run's seed, as a file would be.")

    @model_validator(mode="after")
    def _enough_numbers(self) -> SortDigitsConfig:
        if self.size > 10**self.num_digits:
            raise ValueError(
                f"size {self.size}: there are only {10**self.num_digits} numbers of {self.num_digits} digits"
            )
        return self


class CurriculumStage(Section):
    """The changes of a curriculum at one episode."""

    from_episode: int = Field(0, ge=0, description="The first episode of the stage.")
    success: SuccessRange | None = Field(None, description="[lowest, highest] success rate; null: the curriculum's.")
    pools: list[str] | None = Field(None, description="Draw from these pools only; null: from all.")


class CurriculumConfig(Section):
    """Which prompts are drawn, by the success rates of their answers so far. Without it, all are drawn in turn."""

    success: SuccessRange = Field(
        (0.0, 1.0), description="[lowest, highest] success rate of prompts that are drawn; new ones always are."
    )
    success_score: float = Field(1.0, description="Score from which an answer is a success.")
    reward: str | None = Field(None, description="Reward (its label) that is the score; null takes the first.")
    newest_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Weight of a prompt's newest answers in its rate, beside the earlier ones.",
    )
    revisit_after: Count = Field(
        4, description="Times in a row that a prompt outside of `success` is passed over before it is drawn again."
    )
    retire_after: Count | None = Field(
        None, description="Visits in a row with nothing but successes after which a prompt is not drawn again."
    )
    pool: str | None = Field(
        None,
        description="Key of the records that names their pool, such as level, or source in a mixture; a prompt never "
        "sampled has its pool's rate.",
    )
    stages: list[CurriculumStage] = Field(default_factory=list, description="Changes by episode, the last one holds.")

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        if not run.rolls_out:
            yield Problem("", f"{run.algorithm.name} learns from a dataset: there is no answer to judge by")
        elif self.reward is not None and self.reward not in run.reward_weights:
            rewards = list(run.reward_weights)
            near = suggestion(self.reward, rewards)
            yield Problem("reward", f'no reward "{self.reward}" in this run{near} (rewards: {rewards})')

    def sampler(self, records: PromptStream) -> Sampler:
        make = import_module("rlhf_data.curriculum").make_curriculum  # imported when it is used, as a `build`
        return cast("Sampler", make(self, records))

    @model_validator(mode="after")
    def _makes_sense(self) -> CurriculumConfig:
        for low, high in (self.success, *(stage.success for stage in self.stages if stage.success)):
            if low > high:
                raise ValueError(f"success needs lowest <= highest, got {[low, high]}")
        episodes = [stage.from_episode for stage in self.stages]
        if episodes != sorted(episodes):
            raise ValueError("stages should stand in the order of from_episode")
        if self.pool is None and any(stage.pools for stage in self.stages):
            raise ValueError("stages name pools, but there is no `pool`: the key of the records that names theirs")
        return self
