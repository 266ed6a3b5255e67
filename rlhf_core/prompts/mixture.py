"""Several sources as one, each with a share of the stream."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from pydantic import ValidationError

from ..components import PromptsContext
from ..errors import ConfigError
from ..plugins.discovery import load, resolve_build
from ..protocols import PromptSource
from .config import MixtureConfig, MixtureEntry
from .order import Part
from .records import record_name


class Mixture:
    """The records of its sources one after the other; `parts` says how the stream takes turns between them."""

    def __init__(self, sources: Sequence[tuple[str, float, PromptSource]]) -> None:
        """sources: name, weight and records of each."""
        self._sources = [source for _, _, source in sources]
        self._names = [name for name, _, _ in sources]
        self.parts = tuple(Part(name, len(source), weight) for name, weight, source in sources)
        self._ends = list(accumulate(part.size for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        part, inner = self._place(index)
        return {"source": self._names[part], **self._sources[part][inner]}

    def describe(self, index: int) -> str:
        part, inner = self._place(index)
        return record_name(self._sources[part], inner)

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = bisect_right(self._ends, index)
        return part, index - (self._ends[part] - self.parts[part].size)


def build(config: MixtureConfig, context: PromptsContext) -> PromptSource:
    """The source of a `prompts` section."""
    names = [entry.label or entry.name for entry in config.sources]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f'two sources are called "{name}"', where="prompts.sources", hint="give one a `label`")
    return Mixture(
        [
            (name, entry.weight, _build(entry, f"prompts.sources.{place}", context))
            for place, (name, entry) in enumerate(zip(names, config.sources, strict=True))
        ]
    )


def _build(entry: MixtureEntry, where: str, context: PromptsContext) -> PromptSource:
    selected = load("prompts", entry.name)
    try:
        options = selected.component.config.model_validate(entry.options)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"{selected.label}: {told}", where=where) from None
    built: Any = resolve_build(selected)(options, context)
    if not isinstance(built, PromptSource):
        raise ConfigError(f"{selected.label} gives a stream of unknown length, which cannot be mixed", where=where)
    return built
