"""Seeds and orders, each of one purpose."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from running import PATIENCE_SECONDS

from rlhf_core.util.rng import derive_seed, generator, permutation, prompt_order

PARTS = st.lists(st.one_of(st.text(max_size=4), st.integers(-5, 300)), max_size=3)


@given(st.integers(-(2**70), 2**70), PARTS, PARTS)
def test_seeds_are_of_their_purpose_alone(seed: int, one: list[str | int], other: list[str | int]) -> None:
    first, second = derive_seed(seed, *one), derive_seed(seed, *other)
    assert 0 <= first < 2**63
    assert (first == second) == (one == other)
    assert derive_seed(seed + 1, *one) != first


def test_parts_do_not_run_together() -> None:
    assert len({derive_seed(0, "a", "b"), derive_seed(0, "ab"), derive_seed(0, 1), derive_seed(0, "1")}) == 4


def test_seeds_stay_what_they_are() -> None:
    code = (
        "from rlhf_core.util.rng import derive_seed, prompt_order; print(derive_seed(1, 'x', 2), prompt_order(9, 1, 2))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )
    assert other.stdout.strip() == f"{derive_seed(1, 'x', 2)} {prompt_order(9, 1, 2)}"


def test_generators_own_their_state() -> None:
    first, second = generator(0, "a"), generator(0, "a")
    first.random(10)
    assert second.random() == generator(0, "a").random()


@given(st.integers(0, 50), st.integers(0, 100), st.integers(0, 5))
def test_orders_are_permutations(n: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(n, seed, "anything", epoch)) == list(range(n))
    assert prompt_order(n, seed, epoch) == prompt_order(n, seed, epoch)


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(prompt_order(20, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_the_module_is_light() -> None:
    code = "import sys, rlhf_core.util.rng; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )
    assert result.stdout.strip() == "[]"
