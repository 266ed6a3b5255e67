"""Columns: named values of samples, which core carries from their owner to their reader without interpreting them.

An owner (an algorithm, a pass, a section, an environment, an engine, a prompt source) declares them in its attribute
`columns`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .errors import ConfigError, PluginError

Dtype = Literal["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]
_PER = ("token", "sample", "prompt", "metrics")


@dataclass(frozen=True, slots=True)
class Column:
    """Kind of a column's values. Raises `PluginError` for an unknown `per` or `dtype`."""

    per: Literal["token", "sample", "prompt", "metrics"] = "token"
    """token: [A, ...] of a sample and [B, A, ...] of a batch. sample, prompt: [...] and [B, ...]. All samples of a
    prompt share its values, unless a row replaces them. metrics: numbers whose names are unknown before the run,
    {name: float} of a sample and a tuple of B mappings of a batch. Every rank has all samples' (`ItemSummary`)."""
    dtype: Dtype = "float32"
    """torch dtype of the values. Values of `metrics` are Python floats."""
    fill: float = 0.0
    """Value of padding in a batch, also of unequal inner sizes, and of response tokens not sampled by the engine."""
    model_input: bool = False
    """For a column per prompt: whether forward passes of the policy's kind receive it, as the keyword of its name."""
    optional: bool = False
    """For a column per token or sample: whether samples may lack it. In a batch with samples that have it, they get
    `fill`."""

    def __post_init__(self) -> None:
        if self.model_input and self.per != "prompt":
            raise PluginError(f"a column per {self.per} is a model_input", hint="declare it per prompt")
        for option, known in (("per", _PER), ("dtype", get_args(Dtype))):
            if getattr(self, option) not in known:
                raise PluginError(f"a column's {option} is {getattr(self, option)!r}", hint=f"use {', '.join(known)}")

    def cast(self, value: Any) -> Any:
        """Return the value in its stored form: a tensor of `dtype`, or a dict of floats (a batch: a tuple of dicts)."""
        if self.per == "metrics":
            one = isinstance(value, Mapping)
            rows = [{name: float(number) for name, number in row.items()} for row in ([value] if one else value)]
            return rows[0] if one else tuple(rows)
        import torch

        return torch.as_tensor(value, dtype=getattr(torch, self.dtype))


TEMPERATURE = "temperature"
"""Column: the temperature at which each token was sampled. Its `fill`, 0, means the run's temperature."""
ENGINE_COLUMNS: Mapping[str, Column] = {TEMPERATURE: Column(optional=True)}
"""Core's columns that any engine may fill to report how it sampled."""


class Columns(Mapping[str, Any]):
    """Values by the name of their column. Immutable: `columns | Columns(…)` is a changed copy.

    Example:
        >>> columns = Columns({"novelty": [0.5, 0.25]}, {"novelty": Column()})
        >>> columns["novelty"]
        tensor([0.5000, 0.2500])
        >>> columns |= Columns({"round": 3}, {"round": Column(per="sample", dtype="int64")})
        >>> columns.kinds["round"].per, columns["round"]
        ('sample', tensor(3))
    """

    __slots__ = ("_values", "kinds")

    def __init__(self, values: Mapping[str, Any] | None = None, kinds: Mapping[str, Column] | None = None) -> None:
        """Convert each value to the dtype of its column.

        Args:
            values: Column name -> value, with the shapes that `Column.per` lists.
            kinds: Column name -> declaration. May contain columns without a value.

        Raises:
            PluginError: `values` has a name that `kinds` lacks.
        """
        values, kinds = values or {}, kinds or {}
        if unknown := sorted(values.keys() - kinds.keys()):
            raise PluginError(f"no column {unknown[0]!r} is declared", hint="declare it in `columns` of its owner")
        self.kinds = {name: kinds[name] for name in values}
        self._values = {name: kinds[name].cast(value) for name, value in values.items()}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Columns({self._values!r})"

    def __or__(self, other: Columns) -> Columns:
        return _columns(self._values | other._values, self.kinds | other.kinds)

    @property
    def model_inputs(self) -> dict[str, Any]:
        """Column name -> value, for the columns that are inputs of the model's forward pass."""
        return {name: value for name, value in self._values.items() if self.kinds[name].model_input}

    def map(self, change: Callable[[Any, Column], Any]) -> Columns:
        """Return a copy in which each value is replaced by `change(value, kind)`, without conversion."""
        return _columns({name: change(value, self.kinds[name]) for name, value in self._values.items()}, self.kinds)

    def only(self, choose: Callable[[str, Column], bool]) -> Columns:
        """Return a copy with only the columns for which `choose(name, kind)` is true."""
        kinds = {name: kind for name, kind in self.kinds.items() if choose(name, kind)}
        return _columns({name: self._values[name] for name in kinds}, kinds)


def _columns(values: dict[str, Any], kinds: dict[str, Column]) -> Columns:
    """Return columns of values that have their stored form already."""
    columns = Columns()
    columns.kinds, columns._values = kinds, values
    return columns


def columns_of(owner: Any) -> Mapping[str, Column]:
    """Return the class variable `columns` of a class, or {} if it is missing or is an option or method instead."""
    columns = getattr(owner, "columns", {})
    return columns if isinstance(columns, Mapping) else {}


def check_owners(owners: Iterable[tuple[str, Mapping[str, Column]]]) -> None:
    """Raise `ConfigError` if two owners declare the same name. `owners`: the label of each owner, and its columns."""
    owner_of: dict[str, str] = {}
    for owner, columns in owners:
        for name in columns:
            if name in owner_of:
                problem = f"{owner_of[name]} and {owner} both declare a column {name!r}"
                raise ConfigError(problem, where="columns", hint="use one of the two, or have an author rename it")
            owner_of[name] = owner
