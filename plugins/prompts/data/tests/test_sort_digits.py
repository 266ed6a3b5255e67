"""The prompt source `sort-digits`."""

from __future__ import annotations

import pytest

from rlhf_core.config.resolve import resolve
from rlhf_core.errors import ConfigError
from rlhf_data.config import SortDigitsConfig
from rlhf_data.sort_digits import SortDigits
from rlhf_testing.contracts import PromptsContract


class TestSortDigits(PromptsContract):
    plugin = "sort-digits"


def source(**options):
    config = SortDigitsConfig(**options)
    return SortDigits(num_digits=config.num_digits, size=config.size, seed=config.problem_seed)


def test_problems_differ_and_answers_are_sorted():
    made = source(size=3000, num_digits=6)
    records = [made[index] for index in range(len(made))]
    assert len({record["prompt"] for record in records}) == 3000
    for record in records:
        assert len(record["prompt"]) == 7 and record["prompt"].endswith(">")
        assert record["answer"] == record["completion"] == "".join(sorted(record["prompt"][:-1]))


@pytest.mark.parametrize("num_digits", [1, 6])
def test_a_near_miss_differs_in_one_digit(num_digits):
    made = source(size=10, num_digits=num_digits)
    for record in (made[index] for index in range(10)):
        assert record["chosen"] == record["answer"]
        assert len(record["rejected"]) == num_digits and record["rejected"].isdigit()
        assert sum(a != b for a, b in zip(record["chosen"], record["rejected"], strict=True)) == 1


@pytest.mark.parametrize("num_digits", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_all_numbers_of_a_width_can_be_had(num_digits, seed):
    made = source(size=10**num_digits, num_digits=num_digits, problem_seed=seed)
    assert len({made[index]["prompt"] for index in range(len(made))}) == 10**num_digits


def test_leading_digits_are_spread():
    made = source(size=200)
    leading = [made[index]["prompt"][0] for index in range(200)]
    assert min(leading.count(str(digit)) for digit in range(10)) >= 8


def test_seed_decides_and_size_is_bounded():
    assert source()[5] == source()[5] != source(problem_seed=1)[5]
    with pytest.raises(ValueError, match="exceeds the 10 numbers"):
        source(size=11, num_digits=1)
    with pytest.raises(IndexError):
        source(size=10)[10]


def test_more_problems_than_numbers_are_refused():
    run = {"model": {"path": "builtin:tiny-digits"}, "prompts": {"name": "sort-digits", "num_digits": 1, "size": 11}}
    with pytest.raises(ConfigError, match="exceeds the 10 numbers of 1 digits"):
        resolve(run)
