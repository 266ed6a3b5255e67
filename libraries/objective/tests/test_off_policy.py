"""Importance weights, masks of far samples and the length penalty against hand-derived numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_objective import (
    DivergenceBound,
    group_normalised,
    group_spread,
    leave_one_out,
    off_policy_correction,
    overlong_penalty,
)

NAN = math.nan
MASK = torch.tensor([[True, True, False], [True, False, False]])
RATIO = torch.tensor([[3.0, 0.5, NAN], [0.25, NAN, NAN]])
ZEROS = torch.zeros(2, 3)


def test_weights_of_tokens_are_those_of_truncated_importance_sampling() -> None:
    result = off_policy_correction(RATIO.log(), ZEROS, MASK, cap=2.0)
    torch.testing.assert_close(result.weights, torch.tensor([[2.0, 0.5, 0.0], [0.25, 0.0, 0.0]]))
    assert result.truncated.tolist() == [[True, False, False], [False] * 3]
    assert result.effective_sample_size.item() == pytest.approx(2.75**2 / (3 * (4 + 0.25 + 0.0625)))
    torch.testing.assert_close(result.ratio, torch.tensor([[3.0, 0.5, 1.0], [0.25, 1.0, 1.0]]))


def test_weights_of_sequences_are_products() -> None:
    result = off_policy_correction(RATIO.log(), ZEROS, MASK, cap=1.2, level="sequence")
    torch.testing.assert_close(result.weights, torch.tensor([[1.2, 1.2, 0.0], [0.25, 0.0, 0.0]]))
    assert result.truncated.tolist() == [[True, True, False], [False] * 3]


def test_ranges_mask_tokens_and_sequences() -> None:
    tokens = off_policy_correction(RATIO.log(), ZEROS, MASK, token_range=(0.5, 2.0))
    assert tokens.kept.tolist() == [[False, True, False], [False] * 3]
    torch.testing.assert_close(tokens.weights, torch.tensor([[0.0, 0.5, 0.0], [0.0, 0.0, 0.0]]))
    mean = math.sqrt(1.5)  # geometric, of 3 and 1/2
    for low, kept in ((mean - 0.01, True), (mean + 0.01, False)):
        result = off_policy_correction(RATIO.log(), ZEROS, MASK, sequence_range=(low, 2.0))
        assert result.kept.tolist() == [[kept, kept, False], [False] * 3]
    both = off_policy_correction(RATIO.log(), ZEROS, MASK, token_range=(0.4, 9.0), sequence_range=(0.1, 1.0))
    assert not both.kept.any() and both.effective_sample_size.item() == 0.0


def test_a_range_of_tokens_weighs_as_icepop_does() -> None:
    """M(k) = k where low <= k <= high, else 0 (Ling team 2025): what is kept weighs its ratio, and nothing is cut."""
    ratio, mask = torch.tensor([[0.4, 0.5, 1.0, 5.0, 5.1]]), torch.ones(1, 5, dtype=torch.bool)
    result = off_policy_correction(ratio.log(), torch.zeros(1, 5), mask, token_range=(0.5, 5.0))
    torch.testing.assert_close(result.weights, torch.tensor([[0.0, 0.5, 1.0, 5.0, 0.0]]))
    assert not result.truncated.any()
    assert result.effective_sample_size.item() == pytest.approx(6.5**2 / (3 * (0.25 + 1 + 25)))
    capped = off_policy_correction(ratio.log(), torch.zeros(1, 5), mask, token_range=(0.5, 5.0), cap=2.0)
    torch.testing.assert_close(capped.weights, torch.tensor([[0.0, 0.5, 1.0, 2.0, 0.0]]))


def test_a_range_of_sequences_alone_keeps_or_drops() -> None:
    result = off_policy_correction(RATIO.log(), ZEROS, MASK, sequence_range=(1.0, 2.0))
    torch.testing.assert_close(result.weights, torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))


def test_the_weight_of_a_sequence_counts_the_tokens_a_range_drops() -> None:
    """The product over the answer as it was sampled: 3 * 1/2 on the one token left, and 1/4 nowhere."""
    result = off_policy_correction(RATIO.log(), ZEROS, MASK, cap=9.0, level="sequence", token_range=(0.4, 2.0))
    torch.testing.assert_close(result.weights, torch.tensor([[0.0, 1.5, 0.0], [0.0, 0.0, 0.0]]))


def test_a_ratio_never_overflows() -> None:
    result = off_policy_correction(torch.tensor([[500.0]]), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    assert result.ratio.item() == pytest.approx(math.exp(20.0))


def test_long_answers_are_penalised_in_a_line() -> None:
    lengths = torch.tensor([1, 6, 7, 8, 10, 12])
    expected = torch.tensor([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])
    torch.testing.assert_close(overlong_penalty(lengths, max_tokens=10, buffer_tokens=4), expected)


scores_in_groups = st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5, width=32)), min_size=1, max_size=12)


@given(scores_in_groups)
def test_leave_one_out_is_the_group_mean_without_oneself(pairs: list[tuple[int, float]]) -> None:
    groups, scores = torch.tensor([g for g, _ in pairs]), torch.tensor([s for _, s in pairs])
    expected = []
    for index, (group, score) in enumerate(pairs):
        others = [s for j, (g, s) in enumerate(pairs) if g == group and j != index]
        expected.append(score - sum(others) / len(others) if others else 0.0)
    torch.testing.assert_close(leave_one_out(scores, groups), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    plain = group_normalised(scores, groups, divide_by_std=False, leave_one_out=True)
    torch.testing.assert_close(plain, leave_one_out(scores, groups))


def test_spread_of_groups() -> None:
    spread = group_spread(torch.tensor([1.0, 3.0, 2.0, 2.0, 7.0]), torch.tensor([5, 5, 2, 2, 9]))
    assert spread.std_mean == pytest.approx(math.sqrt(2.0) / 3)
    assert spread.without_spread_fraction == pytest.approx(2 / 3)


def test_a_sequence_with_an_outlier_is_dropped_whole() -> None:
    """Ratios 3 and 0.5 in the first row, 0.25 in the second."""
    found = off_policy_correction(RATIO.log(), ZEROS, MASK, outlier_range=(0.1, 2.5))
    assert found.kept.tolist() == [[False] * 3, [True, False, False]]
    assert found.weights.tolist() == [[0.0] * 3, [1.0, 0.0, 0.0]]
    both = off_policy_correction(RATIO.log(), ZEROS, MASK, outlier_range=(0.1, 3.5))
    assert both.kept.tolist() == MASK.tolist()


def test_divergence_by_hand() -> None:
    """k2 of ratios 3, 0.5 and 0.25: log^2 / 2 = 0.603, 0.240, 0.961; k3: r - 1 - log r = 0.901, 0.193, 0.636."""

    def kept(most: float, **options: Any) -> list[list[bool]]:
        bound = DivergenceBound(most, **options)
        found: list[list[bool]] = off_policy_correction(RATIO.log(), ZEROS, MASK, divergence=bound).kept.tolist()
        return found

    nothing, first, second, one = [False] * 3, [True, True, False], [True, False, False], [False, True, False]
    assert kept(0.61, estimator="k2", level="token") == [first, nothing]
    assert kept(0.65, estimator="k3", level="token") == [one, second]
    # Means of the first row: 0.422 and 0.547; sums: 0.844 and 1.094; its largest: 0.603 and 0.901.
    assert kept(0.43, estimator="k2") == [first, nothing] and kept(0.41, estimator="k2") == [nothing, nothing]
    assert kept(0.55) == [first, nothing] and kept(0.54) == [nothing, nothing]
    assert kept(0.85, estimator="k2", level="sequence-sum") == [first, nothing]
    assert kept(0.97, estimator="k2", level="sequence-sum") == [first, second]
    assert kept(0.65, estimator="k3", level="sequence-max") == [nothing, second]
    assert kept(0.91, estimator="k3", level="sequence-max") == [first, second]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("level", ["token", "sequence-mean", "sequence-sum", "sequence-max"])
def test_divergence_agrees_with_a_slow_reference(level: Any, estimator: Any) -> None:
    draw = torch.Generator().manual_seed(4)
    lengths = [3, 1, 5, 2, 4, 0]
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    trainer, engine = torch.randn(2, 6, 5, generator=draw).unbind()
    kl = [[float(trainer[b, t]) - float(engine[b, t]) for t in range(n)] for b, n in enumerate(lengths)]
    kl = [[d * d / 2 if estimator == "k2" else math.exp(d) - 1 - d for d in row] for row in kl]
    figure: dict[str, Any] = {
        "sequence-mean": lambda row: sum(row) / len(row),
        "sequence-sum": sum,
        "sequence-max": max,
    }
    expected = [
        [bool((value if level == "token" else figure[level](row)) <= 0.8) for value in row] + [False] * (5 - len(row))
        for row in kl
    ]
    bound = DivergenceBound(0.8, estimator, level)
    found = off_policy_correction(
        trainer.masked_fill(~mask, NAN), engine.masked_fill(~mask, NAN), mask, divergence=bound
    )
    assert found.kept.tolist() == expected
    assert any(map(any, expected)) and not all(value for row in expected for value in row[:1])
