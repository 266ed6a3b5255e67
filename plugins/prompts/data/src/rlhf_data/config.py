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
        description="Folder (of `save_to_disk`, or of data files), .parquet, .jsonl or .csv file, or hub name.",
    )
    split: str = Field("train", min_length=1, description="Split of a dataset with several splits.")
    subset: str | None = Field(None, description="Configuration of a hub dataset with several configurations.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub dataset. null is the newest.")
    streaming: bool = Field(
        False, description="Read a hub dataset on demand, in its own order, instead of loading all of it."
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Column of the dataset by key, such as {prompt: question, answer: solution}.",
    )


class MixtureEntry(Section):
    """One source of a mixture. Other keys of the entry are options of the source."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    name: str = Field(min_length=1, description="Name of a prompt source.")
    label: str | None = Field(None, min_length=1, description="Value of `source` in its records. null is the name.")
    weight: float = Field(1.0, gt=0, description="Share of the stream relative to the other weights.")
    options: dict[str, Any] = Field({}, description="Options of the source. They may also be written next to its name.")

    @property
    def source_name(self) -> str:
        """Value of `source` in its records. For `./mine.py:lines` it is `lines`."""
        return self.label or self.name.rpartition(":")[2]

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        if shared := sorted(options.keys() & PromptsConfig.model_fields.keys()):
            raise ValueError(f"{', '.join(shared)} applies to the whole mixture: set it next to `sources`")
        return options

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        extra = {key: value for key, value in entry.items() if key not in cls.model_fields}
        rest = {key: value for key, value in entry.items() if key in cls.model_fields}
        options = rest.get("options", {})
        return {**rest, "options": {**options, **extra}} if isinstance(options, dict) else entry


class MixtureConfig(PromptsConfig):
    """Several sources, mixed by weights. A record's `source` is the label of its source."""

    sources: list[MixtureEntry] = Field(
        min_length=1, description="Sources to mix: name, label, weight and options of each."
    )

    @field_validator("sources")
    @classmethod
    def _check_names(cls, sources: list[MixtureEntry]) -> list[MixtureEntry]:
        names = [entry.source_name for entry in sources]
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise ValueError(f'two sources are named "{duplicates[0]}": set a `label` for one of them')
        return sources

    def selections(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for place, entry in enumerate(self.sources):
            yield "prompts", f"sources.{place}", {**entry.options, "name": entry.name}

    def with_selections(self, selected: Sequence[Mapping[str, Any]]) -> MixtureConfig:
        sources = [
            entry.model_copy(update={"name": values["name"], "options": {key: values[key] for key in entry.options}})
            for entry, values in zip(self.sources, selected, strict=True)
        ]
        return self.model_copy(update={"sources": sources})


class SortDigitsConfig(PromptsConfig):
    """Problems like `31415926>`, whose answer is the digits in ascending order."""

    num_digits: int = Field(8, ge=1, le=64, description="Number of digits per problem.")
    size: int = Field(100_000, ge=1, description="Number of different problems.")
    problem_seed: int = Field(0, ge=0, description="Selects the problems, independent of the run's seed.")

    @model_validator(mode="after")
    def _enough_numbers(self) -> SortDigitsConfig:
        if self.size > 10**self.num_digits:
            raise ValueError(f"size {self.size} exceeds the {10**self.num_digits} numbers of {self.num_digits} digits")
        return self
