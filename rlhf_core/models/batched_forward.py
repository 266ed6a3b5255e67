"""Forward passes without gradients over many samples, in batches of bounded tokens and equal count on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..algorithm import Algorithm, DatasetAlgorithm, Item
from ..batching import plan_micro_batches
from .forward_passes import applying, passes_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..place import Place

ItemT = TypeVar("ItemT", bound=Item)


@dataclass(frozen=True, slots=True)
class Reference:
    """The start policy, run forward only."""

    model: nn.Module
    context: Callable[[], AbstractContextManager[Any]]
    """Context of its forward: switches the adapter off where the reference is the policy itself."""


def forward_rows(
    place: Place,
    model: nn.Module,
    items: Sequence[ItemT],
    forward: Callable[[Sequence[ItemT]], Tensor],
    *,
    empty: ItemT,
    batch_tokens: int | None,
    shared: bool = False,
) -> list[Tensor]:
    """`forward`'s output row for each of `items`, float32 on the CPU. Collective; each rank passes its own items.

    `forward` runs `model` on a few items and returns [len(items), ...]; a rank without items left runs `empty`, so
    that all ranks make the same number of forward passes. `shared`: the items are the same on every rank; ranks share
    the work, and all get all rows.
    """
    import torch

    if shared and place.world_size > 1:
        mine = items[place.rank :: place.world_size]
        rows = forward_rows(place, model, mine, forward, empty=empty, batch_tokens=batch_tokens)
        # numpy arrays are exchanged by value; tensors would go through shared memory.
        parts = place.all_gather_objects([row.numpy() for row in rows])
        return [torch.from_numpy(parts[i % place.world_size][i // place.world_size]) for i in range(len(items))]
    passes = passes_of(place)
    plans = plan_micro_batches(items, batch_tokens, passes.price)
    num_steps = int(place.all_reduce(torch.tensor([float(len(plans))]), "max").item())
    found: dict[int, Tensor] = {}
    was_training = model.training
    model.eval()
    with torch.no_grad(), applying(passes, passes.applied(model)), place.autocast():
        for step in range(num_steps):
            plan = plans[step] if step < len(plans) else []
            output = forward([items[i] for i in plan] or [empty]).float().cpu()
            found.update((index, output[row].clone()) for row, index in enumerate(plan))
    model.train(was_training)
    return [found[index] for index in range(len(items))]


def reference_pass(
    algorithm: DatasetAlgorithm[Any, Any],
    reference: Reference,
    place: Place,
    *,
    batch_tokens: int | None,
    offload: bool = False,
) -> Callable[[Sequence[Any]], list[Tensor]]:
    """The `reference` argument of `DatasetAlgorithm.prepare_items`: `reference_forward` over items on every rank.

    `offload`: keep the reference on the CPU between calls.
    """

    def forward(items: Sequence[Any]) -> Tensor:
        batch = algorithm.to_device(algorithm.collate(items), place.device)
        with reference.context():
            return algorithm.reference_forward(reference.model, batch)

    def run(items: Sequence[Any]) -> list[Tensor]:
        if not items:
            return []
        empty = algorithm.masked(items[0])
        with on_device(reference.model, place) if offload else nullcontext():
            return forward_rows(
                place, reference.model, items, forward, empty=empty, batch_tokens=batch_tokens, shared=True
            )

    return run


def no_reference(algorithm: Algorithm[Any, Any]) -> Callable[[Sequence[Any]], list[Tensor]]:
    """Stand-in for an algorithm without the role `reference`; calling it is an error."""

    def run(items: Sequence[Any]) -> list[Tensor]:
        raise TypeError(f"{type(algorithm).__name__} asks a reference, which is not among its roles")

    return run


@contextmanager
def on_device(model: nn.Module, place: Place) -> Iterator[None]:
    """Context in which the model is on the place's device; afterwards it is on the CPU."""
    model.to(place.device)
    try:
        yield
    finally:
        model.to("cpu")
