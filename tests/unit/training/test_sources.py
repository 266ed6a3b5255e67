"""Episodes are cut into batches that the ranks share exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.training.sources import BatchPlan


@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 17),
    epochs=st.integers(1, 3),
    world=st.integers(1, 5),
    version=st.none() | st.integers(0, 9),
)
def test_ranks_partition_every_batch(count, batch, epochs, world, version):
    items = list(range(count))
    plans = [BatchPlan(batch, epochs, rank, world) for rank in range(world)]
    runs = [
        [list(passed) for passed in plan.batches([(item,) for item in items], lambda item: -1, version)]
        for plan in plans
    ]
    for epoch in range(epochs):
        of_ranks = [run[epoch] for run in runs]
        assert len({len(batches) for batches in of_ranks}) == 1
        seen = []
        for index, parts in enumerate(zip(*of_ranks, strict=True)):
            assert all(part.items for part in parts)
            real = sorted(item for part in parts for item in part.items if item >= 0)
            assert real == items[index * batch : (index + 1) * batch]
            gaps = {part.gap_version for part in parts}
            assert gaps == {version if epoch == 0 and index == 0 else None}
            seen += real
        assert seen == items


@pytest.mark.parametrize("world", [1, 3])
def test_a_rank_without_items_gets_one_that_counts_for_nothing(world):
    plan = BatchPlan(2, 1, world - 1, world)
    (batches,) = [list(each) for each in plan.batches([(10,), (11,), (12,)], lambda item: f"masked {item}", None)]
    if world == 1:
        assert [part.items for part in batches] == [[10, 11], [12]]
    else:
        assert [part.items for part in batches] == [["masked 10"], ["masked 12"]]
