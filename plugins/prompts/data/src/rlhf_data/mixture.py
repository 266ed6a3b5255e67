"""Combine several sources into one, each with a share of the stream."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from rlhf_core.components import TaskContext
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.plugins import load
from rlhf_core.prompts import PromptStream, RecordRules
from rlhf_core.protocols import PromptSource

from .config import MixtureConfig, MixtureEntry
from .order import MixtureOrder, shares
from .streamed import MixedRecords, StreamedRecords, origin


class Mixture:
    """The records of its sources, concatenated. In the stream the sources take turns."""

    def __init__(self, sources: Sequence[tuple[str, float, PromptSource]]) -> None:
        """Concatenate `sources`: name, weight and records of each."""
        self._names, self._weights, self._sources = zip(*sources, strict=True)
        self._ends = list(accumulate(map(len, self._sources)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        part, inner = self._place(index)
        return {"source": self._names[part], **self._sources[part][inner]}

    def describe(self, index: int) -> str:
        part, inner = self._place(index)
        return origin(self._sources[part], inner)

    def make_stream(self, rules: RecordRules, *, seed: int, held_out: int) -> PromptStream:
        """Return the records of all sources in turn. Raise `DataError` if one is wrong."""
        records = PromptStream(self, rules, seed=seed, held_out=held_out)
        assert records.training is not None
        records.order = self.order(records.training, seed) or records.order
        return records

    def order(self, training: Sequence[int], seed: int) -> MixtureOrder | None:
        """Order of the `training` records. None for a single source. Raise `DataError` if a source is left without
        records.
        """
        if len(self._sources) == 1:
            return None
        parts: list[tuple[float, Sequence[int]]] = []
        start = 0
        for name, weight, end in zip(self._names, self._weights, self._ends, strict=True):
            indices = array("q", (index for index in training if start <= index < end))
            if not indices:
                raise DataError("all of its records are held out or dropped", where=f"prompts.sources: {name}")
            parts.append((weight, indices))
            start = end
        return MixtureOrder(seed, parts)

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = bisect_right(self._ends, index)
        return part, index - (self._ends[part] - len(self._sources[part]))


class StreamedMixture:
    """Sources that take turns, some of unknown length. Each is read separately."""

    def __init__(self, sources: Sequence[tuple[str, float, PromptSource | Iterable[Mapping[str, Any]]]]) -> None:
        """Combine `sources`: name, weight and records of each."""
        self.sources = [
            (weight, Mixture([(name, 1.0, each)]) if isinstance(each, PromptSource) else _LabeledStream(name, each))
            for name, weight, each in sources
        ]

    def make_stream(self, rules: RecordRules, *, seed: int, held_out: int) -> PromptStream:
        """Return the records of all sources in turn. Each holds out its share."""
        counts = shares([weight for weight, _ in self.sources], held_out)
        parts = [
            (weight, source.make_stream(rules, seed=seed, held_out=count))
            for count, (weight, source) in zip(counts, self.sources, strict=True)
        ]
        return MixedRecords(parts, seed=seed)


class _LabeledStream:
    def __init__(self, name: str, source: Iterable[Mapping[str, Any]]) -> None:
        self._name = name
        self._source = source

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for record in self._source:
            yield {"source": self._name, **record}

    def describe(self, index: int) -> str:
        return origin(self._source, index)

    def make_stream(self, rules: RecordRules, *, seed: int, held_out: int) -> PromptStream:
        return StreamedRecords(self, rules, held_out=held_out)


def build(config: MixtureConfig, context: TaskContext) -> PromptSource | StreamedMixture:
    """Build the prompt source `mixture`."""
    sources = [(entry.source_name, entry.weight, _build(entry, context)) for entry in config.sources]
    lists = [(name, weight, source) for name, weight, source in sources if isinstance(source, PromptSource)]
    return Mixture(lists) if len(lists) == len(sources) else StreamedMixture(sources)


def _build(entry: MixtureEntry, context: TaskContext) -> PromptSource | Iterable[Mapping[str, Any]]:
    selected = load("prompts", entry.name)
    model = selected.component.config  # without core's options, which apply to the mixture
    options = {name: value for name, value in entry.options.items() if name in model.model_fields}
    built: Any = selected.build(model.model_validate(options), context)
    if isinstance(built, PromptSource | Iterable):
        return built
    raise ConfigError(
        f"{selected.label} defines its own order and cannot be mixed",
        where="prompts.sources",
        hint="list the sources of a nested mixture here directly",
    )
