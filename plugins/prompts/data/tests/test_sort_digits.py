"""The prompt source `sort-digits`."""

from __future__ import annotations

import pytest

from rlhf_core.config.resolve import resolve
from rlhf_core.errors import ConfigError
from rlhf_data.sort_digits import SortDigits
from rlhf_testing.contracts import PromptsContract


class TestSortDigits(PromptsContract):
    plugin = "sort-digits"


def test_problems_differ_and_answers_are_sorted():
    source = SortDigits(num_digits=3, size=1000, seed=0)
    records = [source[index] for index in range(len(source))]
    assert len({record["prompt"] for record in records}) == 1000
    assert all(record["answer"] == "".join(sorted(record["prompt"].rstrip(">"))) for record in records)


def test_more_problems_than_numbers_are_refused():
    run = {"model": {"path": "builtin:tiny-digits"}, "prompts": {"name": "sort-digits", "num_digits": 1, "size": 11}}
    with pytest.raises(ConfigError, match="there are only 10 numbers of 1 digits"):
        resolve(run)
