"""Forward passes over an episode: shared by ranks, in step, each sample's own row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlhf_core.batching import collate, masked
from rlhf_core.models.passes import GroupPasses
from rlhf_core.strategy import Strategy
from rlhf_forward.forward import policy_forward
from rlhf_testing.models import tiny_model
from rlhf_testing.samples import make_item


class TwoRanks:
    """Rank `rank` of two; what the other one brings is told beforehand."""

    passes, num_parameters, compute_dtype = Strategy.passes, Strategy.num_parameters, None

    def __init__(self, rank: int = 0, world_size: int = 1, others: Sequence[Any] = (), steps: float = 0.0) -> None:
        self.rank, self.world_size, self.device = rank, world_size, torch.device("cpu")
        self._others, self._steps = others, steps

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        assert op == "max"
        return torch.maximum(tensor, torch.tensor([self._steps]))

    def all_gather_objects(self, value: Any) -> list[Any]:
        gathered = list(self._others)
        gathered.insert(self.rank, value)
        return gathered

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    def autocast(self) -> Any:
        from contextlib import nullcontext

        return nullcontext()


def passes(ranks: Any, model: torch.nn.Module, batch_tokens: int | None = None) -> GroupPasses:
    return GroupPasses(ranks, {"policy": model}, batch_tokens=batch_tokens)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model()


ITEMS = [make_item(i, num_prompt_tokens=1 + i % 3, num_actions=1 + i % 4) for i in range(5)]


def expected(model: torch.nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [policy_forward(model, collate([item]), 0.7).log_probs[0] for item in ITEMS]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("batch_tokens", [None, 1, 12])
def test_each_sample_gets_its_own_log_probs(model: torch.nn.Module, batch_tokens: int | None, shared: bool) -> None:
    def forward(model: torch.nn.Module, items: Sequence[Any]) -> torch.Tensor:
        return policy_forward(model, collate(items), 0.7).log_probs

    model.train()
    empty = masked(ITEMS[0])
    found = passes(TwoRanks(), model, batch_tokens).rows("policy", ITEMS, forward, empty=empty, shared=shared)
    assert model.training, "the mode is put back"
    for row, alone in zip(found, expected(model), strict=True):
        torch.testing.assert_close(row[: len(alone)], alone, rtol=1e-5, atol=1e-5)
        assert not row.requires_grad


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_share_the_work_and_all_get_all_of_it(model: torch.nn.Module, rank: int) -> None:
    def forward(_: torch.nn.Module, items: Sequence[Any]) -> torch.Tensor:
        return torch.tensor([[float(item.sample_id)] for item in items])

    theirs = [[[float(i)] for i in range(1 - rank, 5, 2)]]
    strategy = TwoRanks(rank, 2, [[torch.tensor(row).numpy() for row in theirs[0]]])
    rows = passes(strategy, model).rows("policy", ITEMS, forward, empty=masked(ITEMS[0]), shared=True)
    assert [row.item() for row in rows] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_rank_with_less_work_runs_empty_batches(model: torch.nn.Module) -> None:
    sizes: list[int] = []

    def forward(_: torch.nn.Module, items: Sequence[Any]) -> torch.Tensor:
        sizes.append(sum(int(item.action_mask.sum()) for item in items))
        return torch.zeros(len(items), 1)

    empty = masked(ITEMS[0])
    assert passes(TwoRanks(steps=3.0), model, 1).rows("policy", [], forward, empty=empty) == []
    assert sizes == [0, 0, 0]
