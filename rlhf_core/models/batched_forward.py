"""Forward passes without gradients over many samples, in batches of bounded tokens and equal count on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..algorithm import Algorithm, DatasetAlgorithm, Item
from ..batching import collate, plan_micro_batches, to_device
from ..types import BufferItem
from .fast_passes import fast_passes
from .forward import policy_forward

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..strategy import Strategy
    from .reference import Reference

ItemT = TypeVar("ItemT", bound=Item)


def forward_rows(
    strategy: Strategy,
    model: nn.Module,
    items: Sequence[ItemT],
    forward: Callable[[Sequence[ItemT]], Tensor],
    *,
    empty: ItemT,
    batch_tokens: int | None,
) -> list[Tensor]:
    """`forward`'s output row for each of `items`, float32 on the CPU. Collective; each rank passes its own items.

    `forward` runs `model` on a few items and returns [len(items), ...]; a rank without items left runs `empty`, so
    that all ranks make the same number of forward passes.
    """
    import torch

    plans = plan_micro_batches([item.num_tokens for item in items], batch_tokens)
    num_steps = int(strategy.all_reduce(torch.tensor([float(len(plans))]), "max").item())
    rows: dict[int, Tensor] = {}
    was_training = model.training
    model.eval()
    with torch.no_grad(), fast_passes(model), strategy.autocast():
        for step in range(num_steps):
            plan = plans[step] if step < len(plans) else []
            output = forward([items[i] for i in plan] or [empty]).float().cpu()
            rows.update((index, output[row].clone()) for row, index in enumerate(plan))
    model.train(was_training)
    return [rows[index] for index in range(len(items))]


def shared_rows(
    strategy: Strategy,
    model: nn.Module,
    items: Sequence[ItemT],
    forward: Callable[[Sequence[ItemT]], Tensor],
    *,
    empty: ItemT,
    batch_tokens: int | None,
) -> list[Tensor]:
    """`forward_rows` for items that are the same on every rank: ranks share the work, and all get all rows."""
    mine = items[strategy.rank :: strategy.world_size]
    rows = forward_rows(strategy, model, mine, forward, empty=empty, batch_tokens=batch_tokens)
    if strategy.world_size == 1:
        return rows
    # numpy arrays are exchanged by value; tensors would go through shared memory.
    parts = strategy.all_gather_objects([row.numpy() for row in rows])
    import torch

    return [torch.from_numpy(parts[i % strategy.world_size][i // strategy.world_size]) for i in range(len(items))]


def with_trainer_log_probs(
    items: Sequence[BufferItem],
    policy: nn.Module,
    strategy: Strategy,
    *,
    empty: BufferItem,
    shared: bool,
    temperature: float,
    batch_tokens: int | None,
) -> list[BufferItem]:
    """Add the trainer's own log-probs to an episode's samples, before any step on them. Collective.

    shared: the items are the same on every rank, and ranks share the work. empty: for a rank without items left.
    """

    def forward(batch: Sequence[BufferItem]) -> Tensor:
        return policy_forward(policy, to_device(collate(batch), strategy.device), temperature).log_probs

    run = shared_rows if shared else forward_rows
    rows = run(strategy, policy, items, forward, empty=empty, batch_tokens=batch_tokens)
    return [
        replace(item, trainer_log_probs=row[: item.num_response_tokens]) for item, row in zip(items, rows, strict=True)
    ]


def reference_pass(
    algorithm: DatasetAlgorithm[Any, Any],
    reference: Reference,
    strategy: Strategy,
    *,
    batch_tokens: int | None,
    offload: bool = False,
) -> Callable[[Sequence[Any]], list[Tensor]]:
    """The `reference` argument of `DatasetAlgorithm.prepare_items`: `reference_forward` over items on every rank.

    `offload`: keep the reference on the CPU between calls.
    """

    def forward(items: Sequence[Any]) -> Tensor:
        batch = algorithm.to_device(algorithm.collate(items), strategy.device)
        with reference.context():
            return algorithm.reference_forward(reference.model, batch)

    def run(items: Sequence[Any]) -> list[Tensor]:
        if not items:
            return []
        empty = algorithm.masked(items[0])
        with OnDevice(reference.model, strategy) if offload else nullcontext():
            return shared_rows(strategy, reference.model, items, forward, empty=empty, batch_tokens=batch_tokens)

    return run


def no_reference(algorithm: Algorithm[Any, Any]) -> Callable[[Sequence[Any]], list[Tensor]]:
    """Stand-in for an algorithm without the role `reference`; calling it is an error."""

    def run(items: Sequence[Any]) -> list[Tensor]:
        raise TypeError(f"{type(algorithm).__name__} asks a reference, which is not among its roles")

    return run


class OnDevice:
    """Context in which the model is on the strategy's device; with `offload` it is on the CPU otherwise."""

    def __init__(self, model: nn.Module, strategy: Strategy) -> None:
        self._model = model
        self._device = strategy.device

    def __enter__(self) -> None:
        self._model.to(self._device)

    def __exit__(self, *exc: object) -> None:
        self._model.to("cpu")
