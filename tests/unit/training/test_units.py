"""Units of work: what must share a forward pass does, on one rank or on several."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drawn_columns import assert_same_columns, columns_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.batching import collate, split
from rlhf_core.errors import PluginError
from rlhf_core.models.forward_passes import ForwardPasses
from rlhf_core.place import LocalPlace
from rlhf_core.training.batches import BatchPlan, Units
from rlhf_core.types import BufferItem


def row(unit: int, num_tokens: int = 1) -> Any:
    return SimpleNamespace(unit=unit, num_tokens=num_tokens)


def by_number(items: Any) -> list[list[Any]]:
    units: dict[int, list[Any]] = {}
    for item in items:
        units.setdefault(item.unit, []).append(item)
    return list(units.values())


UNITS = Units(by_number)
PLACE, MODEL = LocalPlace(torch.device("cpu"), torch.float32), torch.nn.Linear(1, 1)
SAMPLES = st.lists(
    st.lists(st.builds(row, st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=3), min_size=1, max_size=16
)


@given(SAMPLES, st.integers(1, 6), st.integers(1, 4), st.integers(1, 40))
def test_a_unit_is_in_one_batch_on_one_rank_in_one_micro_batch(
    samples: list[list[Any]], size: int, world_size: int, max_tokens: int
) -> None:
    plan = BatchPlan(size, 1, 0, world_size, UNITS)
    (batches,) = plan.passes(samples)
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(len(samples)))
    seen: dict[int, tuple[int, int, int]] = {}
    for number, batch in enumerate(batches):
        shares = plan.shares(samples, batch)
        assert sorted(itertools.chain.from_iterable(shares)) == list(batch)
        for rank, share in enumerate(shares):
            rows = [each for index in share for each in samples[index]]
            plans = UNITS.micro_batches(rows, lambda units: ForwardPasses().plan(units, max_tokens, PLACE, MODEL))
            assert sorted(itertools.chain.from_iterable(plans)) == list(range(len(rows)))
            for micro, places in enumerate(plans):
                micro_batch = [rows[place] for place in places]
                fits = UNITS.price(micro_batch) <= max_tokens
                assert fits or len({each.unit for each in micro_batch}) == 1
                for each in micro_batch:
                    assert seen.setdefault(each.unit, (number, rank, micro)) == (number, rank, micro)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 6), st.integers(1, 4))
def test_by_default_each_item_is_dealt_by_itself(lengths: list[int], size: int, world_size: int) -> None:
    samples = [[row(0, length)] for length in lengths]
    plan = BatchPlan(size, 1, 0, world_size)
    (batches,) = plan.passes(samples)
    every = list(range(len(lengths)))
    assert batches == [every[start : start + size] for start in range(0, len(every), size)]


def test_one_object_may_be_several_items() -> None:
    same = row(0)
    assert Units().places([same, same, row(1)]) == [[0], [1], [2]]


@pytest.mark.parametrize(
    "wrong",
    [lambda items: [items[:1]], lambda items: [items, items[:1]], lambda items: [items, []]],
    ids=["one-left-out", "one-twice", "empty"],
)
def test_units_that_are_not_the_items_name_the_algorithm(wrong: Any) -> None:
    with pytest.raises(PluginError, match="each of the 2 items exactly once") as raised:
        Units(wrong, plugin='algorithm "pairs" (acme 1.0)').places([row(0), row(1)])
    assert "acme" in str(raised.value)


def test_the_price_of_padded_rows_is_that_of_the_longest() -> None:
    assert ForwardPasses().price([row(0, 3), row(0, 5)]) == 10


@given(columns_of(), st.integers(1, 3), st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_balanced_micro_batches_keep_any_columns(items: list[BufferItem], world_size: int, max_tokens: int) -> None:
    """Each row comes back once from the micro-batches of the ranks, with the bits that it had."""
    pairs = Units(lambda rows: [list(pair) for _, pair in itertools.groupby(rows, key=lambda each: each.group_id)])
    samples = [[item] for item in items]
    shares = BatchPlan(len(items), 1, 0, world_size, pairs).shares(samples, range(len(items)))
    found: list[BufferItem] = []
    for share in shares:
        rows = [items[index] for index in share]
        for places in pairs.micro_batches(rows, lambda units: ForwardPasses().plan(units, max_tokens, PLACE, MODEL)):
            found += split(collate([rows[place] for place in places]))
    assert sorted(each.sample_id for each in found) == list(range(len(items)))
    for each in found:
        assert_same_columns(items[each.sample_id], each)
