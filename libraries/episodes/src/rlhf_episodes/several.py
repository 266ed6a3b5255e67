"""`several`: which environment of a run plays a prompt."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import accumulate

from rlhf_core.components import TaskContext
from rlhf_core.errors import DataError
from rlhf_core.types import Prompt
from rlhf_core.util.did_you_mean import suggestion
from rlhf_core.util.rng import derive_seed

from .several_section import SeveralConfig

_PERIOD = 1 << 64
_STEP = 0x9E3779B97F4A7C15
"""Golden ratio of `_PERIOD`, odd. Multiples of it are spread evenly, for any number of consecutive ones."""


class Shares:
    """Assigns positions of the prompt stream by shares: a pure function of seed and position.

    It does not depend on other positions, so it is the same after a resume, in every process, and for evaluation. Among
    any N consecutive positions, an environment gets its share of N up to a difference that grows with log N.

    Example:
        >>> shares = Shares({"games": 2.0, "sums": 1.0}, seed=0)
        >>> labels = [shares.at(position) for position in range(300)]
        >>> 198 <= labels.count("games") <= 202
        True
    """

    def __init__(self, shares: Mapping[str, float], seed: int) -> None:
        """Divide the positions by `shares`: label -> positive share."""
        self._labels = list(shares)
        exact = [Fraction(share) for share in shares.values()]
        self._ends = [int(end * _PERIOD / sum(exact)) for end in accumulate(exact)]
        self._offset = derive_seed(seed, "several-environments")

    def at(self, position: int) -> str:
        """Return the label of the environment at a position of the stream."""
        return self._labels[bisect_right(self._ends, (self._offset + position * _STEP) % _PERIOD)]


def label_of(record: Mapping[str, object], key: str, labels: list[str], where: str) -> str:
    """Return the environment that a record names.

    Args:
        record: A record of prompts, or its metadata.
        key: Key with the label of the environment.
        labels: Labels of all environments.
        where: Place of the record in errors, such as its file and line.

    Raises:
        DataError: The record lacks the key, or names an unknown environment.
    """
    known = ", ".join(labels)
    if key not in record:
        hint = f"add it with one of {known}, or set environment.by to the key that names the environment"
        raise DataError(f"`{key}` is missing, which selects the environment", where=where, hint=hint)
    label = record[key]
    if isinstance(label, str) and label in labels:
        return label
    near = suggestion(label, labels) if isinstance(label, str) else ""
    raise DataError(
        f"`{key}` is {label!r:.100}, which is not an environment of this run{near}",
        where=where,
        hint=f"the environments in environment.of: {known}",
    )


def build(config: SeveralConfig, context: TaskContext) -> Callable[[Prompt], str]:
    """Return the function from a prompt to the label of its environment."""
    labels = list(config.of)
    if (key := config.by) is not None:
        # A list of prompts is checked before the run. A streamed one is checked here.
        return lambda prompt: label_of(prompt.metadata, key, labels, f"prompt {prompt.position}")
    shares = Shares({label: part.share for label, part in config.of.items()}, context.seed)
    return lambda prompt: shares.at(prompt.position)
