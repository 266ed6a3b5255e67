"""What counts as a score."""

import math
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy
import pytest
import torch
from faulty_rewards import make_rollout
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.rewards.values import LARGEST, BadScore, RewardFault, TurnScores, fits, read_scores
from rlhf_core.types import Turn


@given(st.lists(st.floats(-LARGEST, LARGEST) | st.integers(-(2**80), 2**80) | st.booleans()))
def test_numbers_are_scores(values):
    assert read_scores(values, len(values)) == [float(value) for value in values]


@pytest.mark.parametrize(
    "answer",
    [
        torch.tensor([1.0, 2.0]),
        torch.tensor([1, 2]),
        [torch.tensor(1.0), torch.tensor(2, dtype=torch.bfloat16)],
        numpy.array([1.0, 2.0], dtype=numpy.float16),
        [numpy.float32(1), numpy.int64(2)],
        (1, Fraction(2)),
        (value for value in (1.0, 2.0)),
    ],
)
def test_numbers_of_other_libraries_are_scores(answer):
    scores = read_scores(answer, 2)
    assert scores == [1.0, 2.0]
    assert all(type(score) is float for score in scores)


@pytest.mark.parametrize(
    "value",
    [
        "1.0",
        None,
        math.nan,
        math.inf,
        -math.inf,
        1e39,
        10**400,
        1j,
        Decimal(1),
        [1.0],
        torch.ones(1),
        numpy.float32("nan"),
    ],
    ids=repr,
)
def test_anything_else_is_marked(value):
    first, second = read_scores([0.5, value], 2)
    assert first == 0.5
    assert isinstance(second, BadScore)


@pytest.mark.parametrize("answer", [None, 1.0, "12", b"12", {0: 1.0, 1: 2.0}, torch.tensor(1.0), [1.0], [1.0] * 3, []])
def test_no_collection_of_that_many_is_a_fault(answer):
    with pytest.raises(RewardFault, match=r"returned .*(2 numbers|2 samples)"):
        read_scores(answer, 2)


def test_values_are_shown_but_not_at_length():
    with pytest.raises(RewardFault) as caught:
        read_scores("x" * 10_000, 2)
    assert len(str(caught.value)) < 200


class TestNumbersOfTurns:
    def test_a_mapping_of_turns_is_their_sum(self):
        first, second, third = read_scores([{0: 0.5, 2: numpy.float32(1)}, 3, {}], 3)
        assert (first, second, third) == (1.5, 3.0, 0.0)
        assert isinstance(first, TurnScores) and first.turns == {0: 0.5, 2: 1.0}
        assert isinstance(third, TurnScores) and not third.turns

    @pytest.mark.parametrize(
        ("turns", "says"),
        [
            ({"0": 1.0}, "is not the number of a turn"),
            ({True: 1.0}, "is not the number of a turn"),
            ({0: "good"}, "turn 0: 'good'"),
            ({0: math.nan}, "turn 0: nan is not finite"),
            ({0: {1: 1.0}}, "turn 0: a turn contains turns"),
            ({0: LARGEST, 1: LARGEST}, "too large"),
        ],
    )
    def test_what_is_none_is_marked(self, turns, says):
        (score,) = read_scores([turns], 1)
        assert isinstance(score, BadScore) and says in score.reason

    def test_turns_are_those_of_the_rollout(self):
        turn = Turn(role="policy", text="x", token_ids=(1,), logprobs=(0.0,))
        rollout = replace(make_rollout(0), turns=(turn, turn))
        assert fits(TurnScores({0: 1.0, 1: 2.0}), rollout) == 3.0
        for wrong in ({2: 1.0}, {-1: 1.0}):
            assert isinstance(fits(TurnScores(wrong), rollout), BadScore)
