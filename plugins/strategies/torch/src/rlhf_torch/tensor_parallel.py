"""Tensor parallelism: the matrices of a model's blocks are split over processes that compute each row together.

The model's plan defines the split (`base_model_tp_plan` of its transformers config). A column-wise matrix keeps some of
its outputs (attention heads, MLP units), and the following row-wise matrix keeps the matching inputs. Their products
are partial sums, which the processes add up. Embedding and head are split by rows of the vocabulary
(`vocabulary_parallel.py`). Other matrices, and those that cannot be split this way, are also stored in parts
and gathered for computing.

With `sequence_parallel`, each process computes the operations between those pairs (norms, residuals) only for its part
of the positions, so activations are split as well (Korthikanti 2022, arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from rlhf_strategies import StoredParameter, blank_tensor

from .blocks import transformer_blocks
from .tensor_parallel_plan import Style, own_parameters, plan_of
from .vocabulary_parallel import split_vocabulary

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_POSITIONS = Shard(1)
"""Split of hidden states [B, S, H] between the blocks' pairs of matrices."""


def parallelise(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split `model` over the processes of the one-dimensional `mesh`, in place: its parameters become `DTensor`s.

    Call it before `fully_shard`, which must see these parameters and whose units must be the model's blocks and the
    model. Raises `UserInputError` for an unsupported model.
    """
    plan = plan_of(model, mesh.size())
    blocks, units = transformer_blocks(plan.trunk), transformer_blocks(model)
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    vocabulary = split_vocabulary(model, mesh)
    weights = []
    for module, name, parameter in own_parameters(model):
        style: Style | None = "rows" if id(module) in vocabulary else plan.styles.get(id(parameter))
        is_partial = sequence_parallel and id(parameter) in in_blocks
        weights.append(_Weight(module, name, _sharding(style, parameter, mesh, is_partial)))
    _split(weights, mesh)
    places = [*(part for unit in units for part in _parts(unit)), *units, model]
    inside: dict[int, nn.Module] = {}
    for place in places:
        for module in place.modules():
            inside.setdefault(id(module), place)
    for place in places:
        # Registered before `fully_shard`'s hooks, so weights are gathered before `_place` and freed after `_remove`.
        _LocalWeights([each for each in weights if inside[id(each.module)] is place]).attach(place)
    layout = _HiddenLayout(mesh, sequence_parallel)
    for parent in plan.parents:
        parent.register_forward_pre_hook(layout.enter, with_kwargs=True)
    for module in plan.rowwise:
        module.register_forward_hook(layout.leave)
    if sequence_parallel:
        for block in blocks:
            block.register_forward_pre_hook(layout.note_length, with_kwargs=True)
        blocks[0].register_forward_pre_hook(layout.begin, with_kwargs=True)
        blocks[-1].register_forward_hook(layout.end)


def _parts(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that a block calls. Gradient checkpointing repeats their hooks, but not always the block's.

    Since transformers 5.24 it repeats a block's `forward`, before that its `__call__`.
    """
    for part in block.children():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            yield from _parts(part)
        else:
            yield part


class _Sharding(NamedTuple):
    """Placements of a parameter in a process."""

    stored: Placement
    computes: Placement
    """Placement during the forward pass: this process's part, or gathered."""
    gradient: Placement
    """`Partial` if the processes' gradients must be added up."""
    share: float = 1.0
    """Factor for a bias that every process adds to its partial sum."""


class _Weight(NamedTuple):
    module: nn.Module
    name: str
    """Name of the parameter in `module`."""
    sharding: _Sharding


def _sharding(style: Style | None, parameter: nn.Parameter, mesh: DeviceMesh, is_partial: bool) -> _Sharding:
    """Choose the placements of a parameter. `is_partial`: each process uses it for its own positions only."""
    if style == "rows":
        return _Sharding(Shard(0), Shard(0), Shard(0))
    if style == "columns":
        return _Sharding(Shard(1), Shard(1), Shard(1))
    if style is not None:
        return _Sharding(Replicate(), Replicate(), Partial(), share=1 / mesh.size() if style == "added" else 1.0)
    divides = parameter.ndim > 1 and parameter.shape[0] % mesh.size() == 0
    return _Sharding(Shard(0) if divides else Replicate(), Replicate(), Partial() if is_partial else Replicate())


def _split(weights: Iterable[_Weight], mesh: DeviceMesh) -> None:
    """Replace each parameter with this process's part. Shared parameters remain shared."""
    split: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module, name, sharding in weights:
        whole = getattr(module, name)
        if id(whole) not in split:
            part = _part(whole, mesh, sharding.stored)
            split[id(whole)] = whole, nn.Parameter(part, requires_grad=whole.requires_grad)
        setattr(module, name, split[id(whole)][1])


def _part(whole: nn.Parameter, mesh: DeviceMesh, stored: Placement) -> DTensor:
    """This process's part of a parameter, blank if the values are still in a file."""
    if not isinstance(whole, StoredParameter):
        part: DTensor = distribute_tensor(whole.detach(), mesh, [stored], src_data_rank=None)
        return part
    shape = list(whole.shape)
    if isinstance(stored, Shard):
        shape[stored.dim] //= mesh.size()
    blank = blank_tensor(shape, whole.dtype).to(mesh.device_type)
    return DTensor.from_local(blank, mesh, [stored], run_check=False, shape=whole.shape, stride=whole.stride())


class _LocalWeights:
    """Replaces parameters with plain local tensors during the forward pass of a module that contains them."""

    def __init__(self, weights: Sequence[_Weight]) -> None:
        self._weights = weights
        self._parameters: list[nn.Parameter | None] = []

    def attach(self, module: nn.Module) -> None:
        if self._weights:
            module.register_forward_pre_hook(self._place)
            module.register_forward_hook(self._remove, always_call=True)

    def _place(self, module: nn.Module, args: object) -> None:
        local: dict[tuple[int, Placement], Tensor] = {}
        self._parameters = [owner._parameters[name] for owner, name, _ in self._weights]
        for (owner, name, sharding), parameter in zip(self._weights, self._parameters, strict=True):
            assert isinstance(parameter, DTensor)
            key = id(parameter), sharding.computes
            if key not in local:
                local[key] = _local(parameter, sharding)
            owner._parameters[name] = local[key]

    def _remove(self, module: nn.Module, args: object, output: object) -> None:
        for (owner, name, _), parameter in zip(self._weights, self._parameters, strict=False):
            owner._parameters[name] = parameter
        self._parameters = []


def _local(parameter: DTensor, sharding: _Sharding) -> Tensor:
    if sharding.computes != sharding.stored:
        parameter = parameter.redistribute(placements=[sharding.computes])
    local: Tensor = parameter.to_local(grad_placements=[sharding.gradient])
    return local if sharding.share == 1.0 else local * sharding.share


class _HiddenLayout:
    """Hooks that redistribute hidden states [B, S, H] between the parts that processes compute separately."""

    def __init__(self, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        self._mesh = mesh
        self._between = _POSITIONS if sequence_parallel else Replicate()
        self._length = 0

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Gather all positions in every process. Each returns a partial gradient."""
        if "position_embeddings" in kwargs:  # of the attention
            self.note_length(module, args, kwargs)
        return _map_hidden(args, kwargs, lambda hidden: self._reshard(hidden, self._between, Replicate(), Partial()))

    def leave(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        """Add up the partial sums."""
        return self._reshard(output, Partial(), self._between, self._between)

    def note_length(self, module: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        """Record the number of positions before the split, again for each pass that checkpointing repeats."""
        self._length = kwargs["position_embeddings"][0].shape[-2]

    def begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Split hidden states over positions."""
        return _map_hidden(args, kwargs, lambda hidden: self._reshard(hidden, Replicate(), _POSITIONS, _POSITIONS))

    def end(self, block: nn.Module, args: object, output: Tensor) -> Tensor:
        """Gather all positions again. The clone avoids a view, about which `fully_shard` warns."""
        return self._reshard(output, _POSITIONS, Replicate(), Replicate()).clone()

    def _reshard(self, hidden: Tensor, source: Placement, target: Placement, gradient: Placement) -> Tensor:
        shape = torch.Size([hidden.shape[0], self._length or hidden.shape[1], *hidden.shape[2:]])
        strides = (shape[1] * shape[2], shape[2], 1)
        sharded = DTensor.from_local(hidden, self._mesh, [source], run_check=False, shape=shape, stride=strides)
        local: Tensor = sharded.redistribute(placements=[target]).to_local(grad_placements=[gradient])
        return local


def _map_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply `change` to the hidden states in a module's arguments: its first argument, positional or by keyword."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
