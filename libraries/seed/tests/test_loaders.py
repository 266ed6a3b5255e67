"""Loaders that are read more than once."""

from __future__ import annotations

import pytest

from rlhf_core.errors import DataError
from rlhf_seed.loaders import CycledLoader, batches_of


def test_a_loader_starts_again_and_goes_on_after_a_resume() -> None:
    endless = CycledLoader(["a", "b", "c"], where="loader")
    assert [next(endless) for _ in range(5)] == ["a", "b", "c", "a", "b"]
    assert endless.num_taken == 5
    resumed = CycledLoader(["a", "b", "c"], where="loader", skip=5)
    assert [next(resumed) for _ in range(2)] == ["c", "a"]
    assert resumed.num_taken == 7
    with pytest.raises(DataError, match="loader: yields no batches"):
        next(CycledLoader([], where="loader"))


def test_epochs_and_steps() -> None:
    assert list(batches_of([1, 2, 3], 2, 0, where="loader")) == [1, 2, 3, 1, 2, 3]
    assert list(batches_of([1, 2, 3], 1, 5, where="loader")) == [1, 2, 3, 1, 2]
    assert list(batches_of([1, 2, 3], 9, 2, where="loader")) == [1, 2]


@pytest.mark.parametrize(("num_epochs", "num_steps"), [(2, 0), (1, 3)])
def test_what_can_be_read_once_only_is_told(num_epochs: int, num_steps: int) -> None:
    with pytest.raises(DataError, match="loader: .*second pass"):
        list(batches_of(iter([1, 2]), num_epochs, num_steps, where="loader"))
    with pytest.raises(DataError, match="loader: yields no batches"):
        list(batches_of([], num_epochs, num_steps, where="loader"))
