"""The prompt source `sort-digits`."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from rlhf_core.config.resolve import resolve
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.prompts import PromptEncoder, PromptStream, RecordRules
from rlhf_data.config import SortDigitsConfig
from rlhf_data.sort_digits import SortDigits
from rlhf_testing.contracts import PromptsContract
from rlhf_testing.models import tiny_tokenizer


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


class CountingEncoder(PromptEncoder):
    """Counts the prompts that it measures."""

    measured = 0

    def lengths(self, records, names):
        self.measured += len(records)
        return super().lengths(records, names)


def streams(made, **rules):
    """The stream of a source, that of the same records as a list, and the encoder of the first one."""
    encoder, other = CountingEncoder(tiny_tokenizer()), PromptEncoder(tiny_tokenizer())
    own = PromptStream.of(made, RecordRules(encoder, **rules), seed=3, held_out=5)
    rows = [made[index] for index in range(len(made))]
    return own, PromptStream.of(rows, RecordRules(other, **rules), seed=3, held_out=5), encoder


@pytest.mark.parametrize("rules", [{}, {"max_prompt_tokens": 9}, {"max_prompt_tokens": 10}, {"max_prompt_tokens": 512}])
def test_its_stream_is_that_of_its_records(rules):
    own, plain, encoder = streams(source(size=5000, num_digits=8), **rules)
    assert own.digest == plain.digest and own.counts == plain.counts and own.training == plain.training
    assert [record for record, _ in own.held_out()] == [record for record, _ in plain.held_out()]
    assert [own.record(position) for position in range(50)] == [plain.record(position) for position in range(50)]
    assert (encoder.measured < 5000) == (rules.get("max_prompt_tokens") in (None, 512))


def test_prompts_that_are_too_long_are_refused():
    with pytest.raises(DataError, match="leave none to train on"):
        streams(source(size=50), max_prompt_tokens=8)


def test_the_digest_is_that_of_lines_of_json():
    made = source(size=300, num_digits=6)
    lines = (json.dumps(dict(made[index]), sort_keys=True) + "\n" for index in range(300))
    assert made.digest() == made.digest() == sha256("".join(lines).encode()).hexdigest()


def test_the_default_problems_stay_the_same():
    """Runs are continued and compared by the digest of their data."""
    assert source().digest() == "74232e874b0413b1c9b58e70b0255abd4fc0138c53c3d095c7ea19ba9883e08a"
