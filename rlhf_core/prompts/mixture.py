"""Several sources as one, each with a share of the stream."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

from ..components import PromptsContext
from ..errors import ConfigError
from ..plugins.discovery import load, resolve_build
from ..protocols import PromptSource, StreamingPromptSource
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


class StreamedMixture:
    """Sources of which some have no known length; each is read on its own, as the stream takes turns between them."""

    def __init__(self, sources: Sequence[tuple[str, float, PromptSource | StreamingPromptSource]]) -> None:
        """sources: name, weight and records of each."""
        self.sources = [
            (weight, Mixture([(name, 1.0, each)]) if isinstance(each, PromptSource) else _LabelledStream(name, each))
            for name, weight, each in sources
        ]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """One source after the other; a stream of prompts has them take turns instead."""
        for _, source in self.sources:
            if isinstance(source, PromptSource):
                yield from (source[index] for index in range(len(source)))
            else:
                yield from source


class _LabelledStream:
    def __init__(self, name: str, source: StreamingPromptSource) -> None:
        self._name = name
        self._source = source

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for record in self._source:
            yield {"source": self._name, **record}

    def describe(self, index: int) -> str:
        return record_name(self._source, index)


def build(config: MixtureConfig, context: PromptsContext) -> PromptSource | StreamingPromptSource:
    """The source of a `prompts` section."""
    sources = [(entry.known_as, entry.weight, _build(entry, context)) for entry in config.sources]
    lists = [(name, weight, source) for name, weight, source in sources if isinstance(source, PromptSource)]
    return Mixture(lists) if len(lists) == len(sources) else StreamedMixture(sources)


def _build(entry: MixtureEntry, context: PromptsContext) -> PromptSource | StreamingPromptSource:
    selected = load("prompts", entry.name)
    built: Any = resolve_build(selected)(selected.component.config.model_validate(entry.options), context)
    if not isinstance(built, StreamedMixture):
        return cast("PromptSource | StreamingPromptSource", built)
    raise ConfigError(
        f"{selected.label} gives a mixture of streams",
        where="prompts.sources",
        hint="list its sources here, beside the others",
    )
