"""The cover of pairs that `test_option_combinations.py` runs."""

from __future__ import annotations

import itertools

import pytest
from pairwise import Choice, pairs_of, pairwise

COLUMNS = {"letter": "abcd", "digit": "123", "sign": "+-"}


def excludes(one: Choice, other: Choice) -> bool:
    return {one[1], other[1]} in ({"a", "1"}, {"b", "-"})


def test_each_allowed_pair_is_covered_and_no_other() -> None:
    rows = pairwise(COLUMNS, excludes=excludes)
    covered = {pair for row in rows for pair in pairs_of(row)}
    choices = [[(column, value) for value in values] for column, values in COLUMNS.items()]
    every = {pair for ours, theirs in itertools.combinations(choices, 2) for pair in itertools.product(ours, theirs)}
    assert covered == {pair for pair in every if not excludes(*pair)}
    assert 11 <= len(rows) <= 13, "eleven letters with a digit are allowed"
    assert rows == pairwise(COLUMNS, excludes=excludes)


def test_a_pair_that_no_combination_can_have_is_named() -> None:
    def only_minus_fits_one(one: Choice, other: Choice) -> bool:
        return excludes(one, other) or {one[1], other[1]} == {"1", "+"}

    with pytest.raises(ValueError, match=r"\('letter', 'b'\), \('digit', '1'\)"):
        pairwise(COLUMNS, excludes=only_minus_fits_one)
