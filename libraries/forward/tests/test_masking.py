"""Masked statistics and aggregation against plain loops, and what no mask may let through."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_forward import (
    aggregate_count,
    aggregate_sum,
    mask_from_lengths,
    masked_mean,
    masked_sum,
    masked_whiten,
    to_tokens,
)
from rlhf_forward.masking import last_true_index, position_ids_of, single_rank, turn_ids, var_over_ranks

AGGREGATIONS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "sequence-mean-token-sum-norm")
POISON = (math.nan, math.inf, -math.inf)


@st.composite
def masked_values(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    count = rows * columns
    numbers = draw(st.lists(st.floats(-10, 10, width=32), min_size=count, max_size=count))
    flags = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return torch.tensor(numbers).view(rows, columns), torch.tensor(flags).view(rows, columns)


def poisoned(values: torch.Tensor, mask: torch.Tensor, poison: float) -> torch.Tensor:
    return torch.where(mask, values, poison).requires_grad_()


def test_hand_derived_numbers() -> None:
    values = torch.tensor([[1.0, 2.0, 99.0], [3.0, 99.0, 99.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert masked_sum(values, mask) == 6.0
    assert masked_mean(values, mask) == 2.0
    assert var_over_ranks(values, mask, single_rank) == pytest.approx(2.0 / 3.0)
    assert masked_mean(values, mask, dim=-1).tolist() == [1.5, 3.0]
    step = math.sqrt(1.5)
    expected = torch.tensor([[-step, 0.0, 0.0], [step, 0.0, 0.0]])
    torch.testing.assert_close(masked_whiten(values, mask), expected)


def test_a_part_is_whitened_as_in_the_whole() -> None:
    """Ranks hold [1, 2] and [3]; seen from the first, the second adds what it has to each sum."""
    whole, here = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 2.0, 99.0]])
    mask = torch.tensor([[True, True, False]])
    of_the_other = iter([torch.tensor([3.0, 1.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)])
    white = masked_whiten(here, mask, all_reduce=lambda part: part + next(of_the_other))
    torch.testing.assert_close(white[:, :2], masked_whiten(whole, torch.ones_like(mask))[:, :2], rtol=0, atol=0)
    assert next(of_the_other, None) is None
    assert not white[~mask].any()


@given(masked_values())
def test_statistics_equal_a_float64_loop(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    values, mask = case
    kept = [float(v) for v, m in zip(values.flatten(), mask.flatten(), strict=True) if m]
    mean = sum(kept) / len(kept) if kept else 0.0
    var = sum((v - mean) ** 2 for v in kept) / len(kept) if kept else 0.0
    assert float(masked_sum(values, mask)) == pytest.approx(sum(kept), rel=1e-6, abs=1e-6)
    assert float(masked_mean(values, mask)) == pytest.approx(mean, rel=1e-6, abs=1e-6)
    assert float(var_over_ranks(values, mask, single_rank)) == pytest.approx(var, rel=1e-6, abs=1e-6)
    white = masked_whiten(values, mask)
    assert (white[~mask] == 0).all()
    expected = [(v - mean) / math.sqrt(var + 1e-8) for v in kept]
    assert white[mask].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@given(masked_values(), st.sampled_from(POISON))
@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_whiten])
def test_what_is_masked_reaches_neither_result_nor_gradient(
    function: object, case: tuple[torch.Tensor, torch.Tensor], poison: float
) -> None:
    values, mask = case
    assert callable(function)
    clean, dirty = poisoned(values, mask, 0.0), poisoned(values, mask, poison)
    results = [function(x, mask) for x in (clean, dirty)]
    assert torch.equal(*results)
    for result in results:
        result.square().sum().backward()
    assert clean.grad is not None and dirty.grad is not None
    assert torch.isfinite(dirty.grad).all() and (dirty.grad[~mask] == 0).all()
    assert torch.equal(clean.grad, dirty.grad)


def test_sums_are_accumulated_in_float64() -> None:
    values = torch.full((1, 3), 1.0)
    values[0, 0] = 2.0**25
    values[0, 2] = -(2.0**25)
    assert masked_sum(values, torch.ones_like(values, dtype=torch.bool)) == 1.0


def test_last_true_index() -> None:
    mask = torch.tensor([[True, False, True, False], [False] * 4, [False, False, False, True]])
    assert last_true_index(mask).tolist() == [2, -1, 3]
    assert last_true_index(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [-1, -1]


def test_lengths_masks_and_positions() -> None:
    assert mask_from_lengths(torch.tensor([2, 0]), 3).tolist() == [[True, True, False], [False] * 3]
    attention = torch.tensor([[False, False, True, True], [True, True, True, False]])
    assert position_ids_of(attention).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
    assert to_tokens(torch.tensor([4.0]), torch.tensor([[True, False]])).tolist() == [[4.0, 0.0]]


def test_aggregations_by_hand() -> None:
    losses = torch.tensor([[1.0, 3.0, math.nan], [5.0, math.nan, math.nan], [math.nan] * 3])
    mask = ~losses.isnan()

    def mean(name: str) -> float:
        return float(aggregate_sum(losses, mask, name, norm_length=4)) / aggregate_count(mask, name)  # type: ignore[arg-type]

    assert mean("token-mean") == 3.0
    assert mean("sequence-mean-token-mean") == 3.5
    assert mean("sequence-mean-token-sum") == 4.5
    assert mean("sequence-mean-token-sum-norm") == 1.125


@given(masked_values(), st.sampled_from(AGGREGATIONS), st.data())
def test_aggregation_does_not_depend_on_the_split(
    case: tuple[torch.Tensor, torch.Tensor], name: str, data: st.DataObject
) -> None:
    values, mask = case
    cut = data.draw(st.integers(0, len(values)))
    whole = values.clone().requires_grad_()
    aggregate_sum(whole, mask, name, 7).backward()  # type: ignore[arg-type]
    split = values.clone().requires_grad_()
    parts = [slice(0, cut), slice(cut, None)]
    total = sum(aggregate_sum(split[part], mask[part], name, 7) for part in parts)  # type: ignore[arg-type]
    assert isinstance(total, torch.Tensor)
    total.backward()
    assert float(total.detach()) == pytest.approx(float(aggregate_sum(values, mask, name, 7)), abs=1e-4)  # type: ignore[arg-type]
    counts = sum(aggregate_count(mask[part], name) for part in parts)  # type: ignore[arg-type]
    assert counts == aggregate_count(mask, name)  # type: ignore[arg-type]
    assert whole.grad is not None and split.grad is not None
    torch.testing.assert_close(whole.grad, split.grad)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_empty_mask_gives_zero(name: str) -> None:
    values = torch.full((2, 3), math.nan)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert aggregate_sum(values, mask, name, 5) == 0.0  # type: ignore[arg-type]
    assert aggregate_count(mask, name) == 0.0  # type: ignore[arg-type]
    assert masked_mean(values, mask) == 0.0 and var_over_ranks(values, mask, single_rank) == 0.0
    assert (masked_whiten(values, mask) == 0.0).all()


def test_wrong_aggregations_are_refused() -> None:
    values, mask = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="norm_length"):
        aggregate_sum(values, mask, "sequence-mean-token-sum-norm")
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        aggregate_sum(values, mask, "mean")  # type: ignore[arg-type]


def test_turns_are_numbered_by_their_stretches() -> None:
    rows = [[1, 1, 0, 1, 0, 0, 1], [0, 0, 1, 0, 0, 0, 0], [0] * 7]
    expected = [[0, 0, -1, 1, -1, -1, 2], [-1, -1, 0, -1, -1, -1, -1], [-1] * 7]
    assert turn_ids(torch.tensor(rows, dtype=torch.bool)).tolist() == expected
