"""Few combinations of options that cover all pairs, made in code. The same columns give the same combinations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

Choice = tuple[str, str]
"""A column and one of its values."""
Pair = tuple[Choice, Choice]


def pairs_of(row: Mapping[str, str]) -> Iterator[Pair]:
    """Yield all pairs of a combination's choices, in the order of its columns."""
    return itertools.combinations(row.items(), 2)


def pairwise(
    columns: Mapping[str, Sequence[str]], *, excludes: Callable[[Choice, Choice], bool]
) -> list[dict[str, str]]:
    """Return combinations that cover every pair of values of two columns that do not exclude each other.

    Greedy: each combination starts from the first pair that is not covered, and takes for one column after the other
    the value with the most pairs that are new (the least used one of equals), without an excluded pair.

    Args:
        columns: Column -> its values.
        excludes: Whether two choices cannot be in one combination.

    Returns:
        Combinations: column -> value, in the order of the columns.

    Raises:
        ValueError: A pair is allowed, but no combination with it is.
    """
    choices = [[(name, value) for value in values] for name, values in columns.items()]
    allowed = [
        pair
        for ours, theirs in itertools.combinations(choices, 2)
        for pair in itertools.product(ours, theirs)
        if not excludes(*pair)
    ]
    left, used, rows = set(allowed), dict.fromkeys(itertools.chain(*choices), 0), []
    for pair in allowed:
        if pair not in left:
            continue
        chosen = _completed(dict(pair), columns, left, used, excludes)
        if chosen is None:
            raise ValueError(f"no combination contains {pair}, although the pair is allowed")
        row = {name: chosen[name] for name in columns}
        rows.append(row)
        left.difference_update(pairs_of(row))
        for choice in row.items():
            used[choice] += 1
    return rows


def _completed(
    row: dict[str, str],
    columns: Mapping[str, Sequence[str]],
    left: set[Pair],
    used: Mapping[Choice, int],
    excludes: Callable[[Choice, Choice], bool],
) -> dict[str, str] | None:
    """Add a value of each other column. None if every way has an excluded pair."""
    order = list(columns)
    free = [name for name in order if name not in row]
    if not free:
        return row

    def is_new(ours: Choice, theirs: Choice) -> bool:
        first, second = sorted((ours, theirs), key=lambda choice: order.index(choice[0]))
        return (first, second) in left

    name = free[0]
    fitting = [
        (name, value) for value in columns[name] if not any(excludes((name, value), each) for each in row.items())
    ]
    gain = {each: sum(is_new(each, other) for other in row.items()) for each in fitting}
    for _, value in sorted(fitting, key=lambda each: (-gain[each], used[each])):
        if (found := _completed({**row, name: value}, columns, left, used, excludes)) is not None:
            return found
    return None
