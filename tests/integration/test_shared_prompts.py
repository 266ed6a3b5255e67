"""Prompts computed once give the gradient of separate rows under every kind of strategy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from running import Forked, ranks, run_all
from unit_plugins import PairMargin

from rlhf_core.training import BatchPlan, Updater
from rlhf_core.training.batches import Units
from rlhf_core.util.tensor_files import load_tree, save_tree
from rlhf_passes.shared_rows import SharedRows
from rlhf_seed.strategies import strategy_by_name
from rlhf_testing.models import tiny_model
from rlhf_testing.samples import make_item

ITEMS = [make_item(i, group_id=i // 2, num_prompt_tokens=2, num_actions=2 + i % 5) for i in range(8)]
ITEMS = [replace(each, prompt_ids=torch.arange(20 + each.group_id) % 9) for each in ITEMS]


def updated(strategy_name: str, passes: str) -> dict[str, torch.Tensor]:
    """The gradient of one update."""
    strategy = strategy_by_name(strategy_name, device="cpu")
    strategy.passes = passes
    strategy.setup()
    try:
        model, algorithm = tiny_model(seed=3), PairMargin()
        trained = strategy.prepare(model, strategy.make_optimizer(model.parameters(), lr=0.1))
        updater = Updater(algorithm, strategy, {"policy": trained}, micro_batch_tokens=70)
        plan = BatchPlan(8, 1, strategy.rank, strategy.world_size, Units(algorithm.units))
        (((rows),),) = plan.rows([[item] for item in ITEMS])
        updater._run([ITEMS[row] for row in rows], None, backward=True)
        found = {name: each.grad for name, each in strategy.unwrap(trained.model).named_parameters()}
        return {
            name: (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone() for name, grad in found.items()
        }
    finally:
        strategy.teardown()


def one_rank(out: Path, strategy: str, rank: int) -> None:
    torch.set_num_threads(1)
    found = counted(strategy)
    if rank == 1:
        save_tree(out / "seen.safetensors", found)


def counted(strategy: str) -> dict[str, torch.Tensor]:
    """`updated` with shared prompts. Check that there were some."""
    made: list[SharedRows] = []
    before = SharedRows.__init__

    def noted(self: SharedRows, *arguments: object) -> None:
        made.append(self)
        before(self, *arguments)  # type: ignore[arg-type]

    SharedRows.__init__ = noted  # type: ignore[method-assign,assignment]
    try:
        found = updated(strategy, "rlhf_passes.fast_passes:FastPasses")
    finally:
        SharedRows.__init__ = before  # type: ignore[method-assign]
    assert made
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return updated("single", "rlhf_forward:PaddedPasses")


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_one_process(expected: dict[str, torch.Tensor]) -> None:
    check_same(counted("single"), expected)


@pytest.mark.parametrize("strategy", ["ddp", "torch-ddp", "fsdp"])
@pytest.mark.slow_except("torch-ddp")
def test_two_ranks(tmp_path: Path, strategy: str, expected: dict[str, torch.Tensor]) -> None:
    run_all(*(Forked(one_rank, tmp_path, strategy, rank, env=place) for rank, place in enumerate(ranks(2))))
    check_same(load_tree(tmp_path / "seen.safetensors"), expected)
