"""Passes of an algorithm over finished samples, with models that run in batches of bounded tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..algorithm import Algorithm, GroupPass, Item, PassContext, RolloutAlgorithm
from ..batching import collate, masked, to_device
from ..columns import Columns
from ..errors import PluginError
from ..place import LocalPlace, Place
from ..plugins.errors_of import errors_of
from ..types import BufferItem, Experience, Role, RolloutGroup
from .forward_passes import applying, passes_of

if TYPE_CHECKING:
    from torch import Tensor, nn

ItemT = TypeVar("ItemT", bound=Item)
_FIELDS = ("reference_log_probs", "values")
"""Fields of an item that a pass may set by name. All other names are columns."""


class GroupPasses(PassContext):
    """The passes of a run over finished groups, and the models of this process that they use.

    Passes run one after the other. A later one sees the columns of earlier ones.
    """

    def __init__(
        self,
        place: Place,
        models: Mapping[Role, nn.Module],
        make: Callable[[PassContext], Sequence[GroupPass]] | None = None,
        *,
        temperature: float = 1.0,
        batch_tokens: int | None = None,
        around: Mapping[Role, Callable[[], AbstractContextManager[Any]]] | None = None,
        offloaded: Collection[Role] = (),
    ) -> None:
        """Create the passes of this process.

        Args:
            place: Device, precision and processes.
            models: Role -> model.
            make: Creates the passes, such as `RolloutAlgorithm.passes`. None without passes.
            temperature: Sampling temperature of answers.
            batch_tokens: Maximum price of a forward pass, in tokens. None chooses it by device and model size.
            around: Role -> factory of a context around its forward passes, for example to disable an adapter.
            offloaded: Roles whose models are in host memory between their passes.
        """
        self.place = place
        self.models = models
        self.temperature = temperature
        self._batch_tokens = batch_tokens
        self._around = around or {}
        self.offloaded = offloaded
        self.passes = () if make is None else make(self)

    def forward(
        self, role: Role, groups: Sequence[RolloutGroup], run: Callable[[nn.Module, Experience], Tensor]
    ) -> list[Tensor]:
        """See `PassContext.forward`."""
        items = [item for group in groups for item in group.items]

        def rows_of(model: nn.Module, batch: Sequence[BufferItem]) -> Tensor:
            return run(model, to_device(collate(batch), self.place.device))

        rows = self.rows(role, items, rows_of, empty=masked(items[0] if items else _placeholder()))
        return [row[: item.num_response_tokens] for item, row in zip(items, rows, strict=True)]

    def rows(
        self,
        role: Role,
        items: Sequence[ItemT],
        run: Callable[[nn.Module, Sequence[ItemT]], Tensor],
        *,
        empty: ItemT,
        shared: bool = False,
    ) -> list[Tensor]:
        """Run a model without gradients over items, in batches of bounded tokens. Collective.

        Args:
            role: The model.
            items: This rank's items, or the same items on every rank if `shared`.
            run: Called as `run(model, batch)`. Returns [B, ...].
            empty: Masked item, which a rank runs if other ranks make more forward passes.
            shared: Whether ranks share the work, and all receive all rows.

        Returns:
            [...] float32 on the CPU for each item in order.

        Raises:
            TypeError: The model is not among the algorithm's roles.
        """
        import torch

        place = self.place
        if shared and place.world_size > 1:
            rows = self.rows(role, items[place.rank :: place.world_size], run, empty=empty)
            # numpy arrays are exchanged by value. Tensors would use shared memory.
            parts = place.all_gather_objects([row.numpy() for row in rows])
            return [torch.from_numpy(parts[i % place.world_size][i // place.world_size]) for i in range(len(items))]
        try:
            model = self.models[role]
        except KeyError:
            raise TypeError(f"the algorithm runs a {role}, which is not among its roles") from None
        passes = passes_of(place)
        plans = passes.plan([[item] for item in items], self._batch_tokens, place, model)
        num_steps = int(place.all_reduce(torch.tensor([float(len(plans))]), "max").item())
        outputs: dict[int, Tensor] = {}
        on_device = _on_device(model, place) if role in self.offloaded else nullcontext()
        with on_device, self._around.get(role, nullcontext)():
            was_training = model.training
            model.eval()
            with torch.no_grad(), applying(passes, passes.applied(model)), place.autocast():
                for step in range(num_steps):
                    plan = plans[step] if step < len(plans) else []
                    output = run(model, [items[i] for i in plan] or [empty]).float().cpu()
                    outputs.update((index, output[row].clone()) for row, index in enumerate(plan))
            model.train(was_training)
        return [outputs[index] for index in range(len(items))]

    def run(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with the values of all passes added to their items. Collective if a model is sharded."""
        done = self.place.agreed(list(groups))
        for each in self.passes:
            rows, num_items = list(each.run(done)), sum(len(group.items) for group in done)
            if len(rows) != num_items:
                raise PluginError(f"it returned {len(rows)} rows for {num_items} samples", where=type(each).__name__)
            values = iter(rows)
            done = [
                replace(group, items=tuple(_filled(item, next(values), each) for item in group.items)) for group in done
            ]
        return done

    def published(self, version: int) -> None:
        """Notify the passes that the trained models in this process have the weights of `version`."""
        for each in self.passes:
            each.published(version)


@contextmanager
def _on_device(model: nn.Module, place: Place) -> Iterator[None]:
    """Move the model to the place's device, and back to the CPU at the end of the context."""
    model.to(place.device)
    try:
        yield
    finally:
        model.to("cpu")


def planned_passes(algorithm: Algorithm[Any, Any], label: str, temperature: float) -> Sequence[GroupPass]:
    """Return the algorithm's passes before models are loaded, to read their columns. Empty for a dataset algorithm."""
    import torch

    if not isinstance(algorithm, RolloutAlgorithm):
        return ()
    place = LocalPlace(torch.device("cpu"), torch.float32)
    models: Mapping[Role, nn.Module] = defaultdict(_unloaded)
    with errors_of(label, "passes"):
        return GroupPasses(place, models, algorithm.passes, temperature=temperature).passes


def _unloaded() -> nn.Module:
    raise PluginError(
        "a pass reads `context.models` in its constructor", hint="read it in `run`: models are loaded later"
    )


def _filled(item: BufferItem, row: Mapping[str, Any], by: GroupPass) -> BufferItem:
    fields = {name: row[name] for name in _FIELDS if name in row}
    if len(fields) < len(row):
        rest = {name: value for name, value in row.items() if name not in fields}
        fields["columns"] = item.columns | Columns(rest, by.columns)
    return replace(item, **fields)


def _placeholder() -> BufferItem:
    """Return a filler sample of two tokens, which a rank without samples runs to stay in lockstep."""
    import torch

    return BufferItem(
        sample_id=-1,
        group_id=-1,
        policy_version=0,
        prompt_ids=torch.zeros(1, dtype=torch.int64),
        response_ids=torch.zeros(1, dtype=torch.int64),
        action_mask=torch.zeros(1, dtype=torch.bool),
        action_log_probs=torch.zeros(1),
    )
