"""Pairs that must share a forward pass train alike on one rank and on two, under any passes with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from running import Forked, ranks, run_all
from unit_plugins import PairMargin, ReversedPasses

from rlhf_core.models import ForwardPasses
from rlhf_core.training import BatchPlan, Updater
from rlhf_core.training.batches import Units, filled
from rlhf_core.util.tensor_files import load_tree, save_tree
from rlhf_seed.strategies import strategy_by_name
from rlhf_testing.models import tiny_model
from rlhf_testing.samples import make_item

PASSES = {
    "padded": "rlhf_forward:PaddedPasses",
    "default": "rlhf_core.models.forward_passes:ForwardPasses",
    "fast": "rlhf_passes.fast_passes:FastPasses",
    "reversed": "unit_plugins:ReversedPasses",
}
ITEMS = [make_item(i, group_id=i // 2, num_prompt_tokens=2 + i % 3, num_actions=1 + i * 5 % 7) for i in range(10)]


def updated(strategy_name: str, passes: str, max_tokens: int | None) -> dict[str, torch.Tensor]:
    """The gradient of one update of all pairs, in whose micro-batches there is room for about one of them."""
    strategy = strategy_by_name(strategy_name, device="cpu")
    strategy.passes = PASSES[passes]
    strategy.setup()
    try:
        model, algorithm = tiny_model(seed=3), PairMargin()
        trained = strategy.prepare(model, strategy.make_optimizer(model.parameters(), lr=0.1))
        updater = Updater(algorithm, strategy, {"policy": trained}, micro_batch_tokens=max_tokens)
        plan = BatchPlan(10, 1, strategy.rank, strategy.world_size, Units(algorithm.units))
        rows = plan.rows([[item] for item in ITEMS])
        ((batch,),) = filled(rows, dict(enumerate(ITEMS)), algorithm.masked(ITEMS[0]))
        updater._run(batch, None, backward=True)
        gradients = {
            name: parameter.grad.clone() for name, parameter in strategy.unwrap(trained.model).named_parameters()
        }
        return gradients
    finally:
        strategy.teardown()


def one_rank(out: Path, passes: str, rank: int) -> None:
    torch.set_num_threads(1)
    found = updated("ddp", passes, 12)
    if rank == 1:
        save_tree(out / "seen.safetensors", found)


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return updated("single", "padded", None)


@pytest.mark.parametrize("passes", PASSES)
def test_micro_batches_and_passes_leave_the_gradient_as_it_is(passes: str, expected: dict[str, torch.Tensor]) -> None:
    entered = ReversedPasses.entered
    check_same(updated("single", passes, 12), expected)
    assert (ReversedPasses.entered > entered) == (passes == "reversed")


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.slow_except("default", "fast")
def test_two_ranks_have_the_gradient_of_one(tmp_path: Path, passes: str, expected: dict[str, torch.Tensor]) -> None:
    # Each in processes of its own: a second group at one port can meet the store of the first.
    run_all(*(Forked(one_rank, tmp_path, passes, rank, env=place) for rank, place in enumerate(ranks(2))))
    check_same(load_tree(tmp_path / "seen.safetensors"), expected)


def test_the_padded_passes_are_the_default_of_a_strategy() -> None:
    from rlhf_core.models.forward_passes import applied_passes, passes_of
    from rlhf_core.strategy import Strategy

    assert type(applied_passes()) is ForwardPasses
    assert type(passes_of(Strategy)) is ForwardPasses  # type: ignore[arg-type]
