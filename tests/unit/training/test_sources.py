"""Episodes are cut into batches that the ranks share exactly."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.batching import balanced
from rlhf_core.training.batches import BatchPlan, filled


@dataclass(frozen=True, order=True)
class Item:
    number: int
    num_tokens: int = 1


@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 17),
    epochs=st.integers(1, 3),
    world=st.integers(1, 5),
)
def test_ranks_partition_every_batch(count, batch, epochs, world):
    items = [Item(number, 1 + number * 7 % 11) for number in range(count)]
    plans = [BatchPlan(batch, epochs, rank, world) for rank in range(world)]
    numbered = dict(enumerate(items))
    runs = [filled(plan.rows([(item,) for item in items]), numbered, Item(-1)) for plan in plans]
    for epoch in range(epochs):
        of_ranks = [run[epoch] for run in runs]
        assert len({len(batches) for batches in of_ranks}) == 1
        seen = []
        for index, parts in enumerate(zip(*of_ranks, strict=True)):
            assert all(parts)
            real = sorted(item for part in parts for item in part if item.number >= 0)
            assert real == items[index * batch : (index + 1) * batch]
            seen += real
        assert seen == items


@pytest.mark.parametrize("world", [1, 3])
def test_a_rank_without_items_gets_one_that_counts_for_nothing(world):
    plan = BatchPlan(2, 1, world - 1, world)
    samples = [(Item(10),), (Item(11),), (Item(12),)]
    items = {row: item for row, (item,) in enumerate(samples)}
    (batches,) = filled(plan.rows(samples), items, "masked")
    if world == 1:
        assert [[item.number for item in part] for part in batches] == [[10, 11], [12]]
    else:
        assert batches == [["masked"], ["masked"]]


@given(lengths=st.lists(st.integers(1, 50), max_size=30), parts=st.integers(1, 6))
def test_parts_of_about_as_many_tokens(lengths, parts):
    split = balanced(lengths, parts)
    assert sorted(index for part in split for index in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in split)
    loads = [sum(lengths[index] for index in part) for part in split]
    # Ranks wait for the longest part; Graham's bound, and what neighbours may cost.
    assert max(loads) <= 1.02 * (sum(lengths) / parts + max(lengths, default=0))
    assert sum(map(bool, split)) == min(parts, len(lengths))


def test_neighbours_stay_together_where_parts_are_as_even():
    assert balanced([5] * 7, 3) == [[0, 1], [2, 3, 4], [5, 6]]
    assert balanced([7, 8, 7, 8, 8, 7, 8, 7], 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert balanced([100, 1, 1], 3) == [[0], [1], [2]]


def test_samples_of_many_lengths_are_split_by_the_longest_first():
    assert balanced([9, 1, 9, 1, 1, 1], 2) == [[0, 1, 4], [2, 3, 5]]
