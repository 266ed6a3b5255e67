"""How models run over units of rows: the price of a forward pass, its context, and passes without gradients.

What a pass computes is a library's (`rlhf_forward`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

from ..algorithm import Item
from ..batching import plan_micro_batches
from ..place import Place

if TYPE_CHECKING:
    from torch import Tensor, nn

ItemT = TypeVar("ItemT", bound=Item)


class ForwardPasses:
    """The price of a forward pass, and the context that it runs in.

    A place or strategy names a subclass in `passes`. It is built without arguments, on every rank. Ranks and
    micro-batches are dealt by `price`. `applied` is entered for each forward and its backward. Within it
    `applied_passes` returns this object to the code that computes (`rlhf_forward`).
    """

    def price(self, rows: Sequence[Item]) -> int:
        """Cost, in tokens, of one forward over `rows` (at least one). It never falls when rows are added.

        Rows may be summaries of samples that another rank holds: every rank must get the same price. By default, the
        cost of rows padded to the longest.
        """
        return len(rows) * max(row.num_tokens for row in rows)

    def applied(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Context of one forward of `models` and its backward."""
        return nullcontext()


_APPLIED: ContextVar[ForwardPasses] = ContextVar("applied passes")


def passes_of(place: Place) -> ForwardPasses:
    """The passes that the place names."""
    passes: ForwardPasses = resolve_name(place.passes)()
    return passes


def applied_passes() -> ForwardPasses:
    """Those of the surrounding `applying`; the base class outside of one."""
    return _APPLIED.get(ForwardPasses())


@contextmanager
def applying(passes: ForwardPasses, inside: AbstractContextManager[Any]) -> Iterator[None]:
    """Context in which forwards run by `passes`. inside: `passes.applied(...)`, or a context in its place."""
    token = _APPLIED.set(passes)
    try:
        with inside:
            yield
    finally:
        _APPLIED.reset(token)


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


@contextmanager
def on_device(model: nn.Module, place: Place) -> Iterator[None]:
    """Context in which the model is on the place's device; afterwards it is on the CPU."""
    model.to(place.device)
    try:
        yield
    finally:
        model.to("cpu")
