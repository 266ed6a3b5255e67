"""Options of the prompt sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, Field, field_validator, model_validator

from rlhf_core import Section
from rlhf_core.config import PromptsConfig


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
