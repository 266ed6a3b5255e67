"""Tensor parallelism: the matrices of a model's blocks split over a few processes that compute each row together.

Which matrix is split how, the model says (`base_model_tp_plan` of its transformers configuration). A column-wise one
keeps some of its outputs (heads of the attention, units of the MLP), a row-wise one the inputs that belong to them;
their products are partial sums, which the processes add up. Embedding and head are split by rows of the vocabulary
(`vocabulary_parallel.py`). What cannot be split so, and other matrices outside of the plan, are kept in parts too, and
gathered where they compute.

With `sequence_parallel` what lies between those pairs (norms, residuals) is computed by each process for its part of
the positions only, so activations are split as well (Korthikanti 2022, arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
"""How hidden states [B, S, H] are split between the blocks' pairs of matrices."""


def parallelise(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split `model` over the processes of `mesh` (one dimension), in place: its parameters become `DTensor`s.

    Call it before `fully_shard`, which has to see the parameters so, and whose units then are the model's blocks and
    the model. Raises `UserInputError` for a model that cannot be split so.
    """
    plan = plan_of(model, mesh.size())
    blocks, units = transformer_blocks(plan.trunk), transformer_blocks(model)
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    vocabulary = split_vocabulary(model, mesh)
    weights = []
    for module, name, parameter in own_parameters(model):
        style: Style | None = "rows" if id(module) in vocabulary else plan.styles.get(id(parameter))
        is_partial = sequence_parallel and id(parameter) in in_blocks
        weights.append(_Weight(module, name, _held(style, parameter, mesh, is_partial)))
    _split(weights, mesh)
    inside = {id(module): unit for unit in units for module in unit.modules()}
    for unit in [*units, model]:
        # Registered before `fully_shard` does: its weights are there before the forward pass and leave behind it.
        _LocalWeights([each for each in weights if inside.get(id(each.module), model) is unit]).attach(unit)
    flow = _Flow(mesh, sequence_parallel)
    for parent in plan.parents:
        parent.register_forward_pre_hook(flow.enter, with_kwargs=True)
    for module in plan.rowwise:
        module.register_forward_hook(flow.leave)
    if sequence_parallel:
        for block in blocks:
            block.register_forward_pre_hook(flow.note_length, with_kwargs=True)
        blocks[0].register_forward_pre_hook(flow.begin, with_kwargs=True)
        blocks[-1].register_forward_hook(flow.end)


class _Held(NamedTuple):
    """How a process holds a parameter and computes with it."""

    stored: Placement
    computes: Placement
    """Its part, or gathered for the forward pass."""
    gradient: Placement
    """`Partial`: the gradients of the processes have to be added up."""
    share: float = 1.0
    """What a bias is multiplied by that every process adds to its partial sum."""


class _Weight(NamedTuple):
    module: nn.Module
    name: str
    """In `module`."""
    held: _Held


def _held(style: Style | None, parameter: nn.Parameter, mesh: DeviceMesh, is_partial: bool) -> _Held:
    """`is_partial`: each process computes with this parameter for its own positions only."""
    if style == "rows":
        return _Held(Shard(0), Shard(0), Shard(0))
    if style == "columns":
        return _Held(Shard(1), Shard(1), Shard(1))
    if style is not None:
        return _Held(Replicate(), Replicate(), Partial(), share=1 / mesh.size() if style == "added" else 1.0)
    divides = parameter.ndim > 1 and parameter.shape[0] % mesh.size() == 0
    return _Held(Shard(0) if divides else Replicate(), Replicate(), Partial() if is_partial else Replicate())


def _split(weights: Iterable[_Weight], mesh: DeviceMesh) -> None:
    """Replace each parameter by this process's part of it; shared ones stay shared."""
    split: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module, name, held in weights:
        whole = getattr(module, name)
        if id(whole) not in split:
            part = _part(whole, mesh, held.stored)
            split[id(whole)] = whole, nn.Parameter(part, requires_grad=whole.requires_grad)
        setattr(module, name, split[id(whole)][1])


def _part(whole: nn.Parameter, mesh: DeviceMesh, stored: Placement) -> DTensor:
    """This process's part; of one whose values are still in a file, a blank one."""
    if not isinstance(whole, StoredParameter):
        part: DTensor = distribute_tensor(whole.detach(), mesh, [stored], src_data_rank=None)
        return part
    shape = list(whole.shape)
    if isinstance(stored, Shard):
        shape[stored.dim] //= mesh.size()
    blank = blank_tensor(shape, whole.dtype).to(mesh.device_type)
    return DTensor.from_local(blank, mesh, [stored], run_check=False, shape=whole.shape, stride=whole.stride())


class _LocalWeights:
    """Gives the modules of a unit of `fully_shard` plain tensors to compute with, for the time of its forward pass."""

    def __init__(self, weights: Sequence[_Weight]) -> None:
        self._weights = weights
        self._parameters: list[nn.Parameter | None] = []

    def attach(self, unit: nn.Module) -> None:
        unit.register_forward_pre_hook(self._place)
        unit.register_forward_hook(self._remove, always_call=True)

    def _place(self, unit: nn.Module, args: object) -> None:
        local: dict[tuple[int, Placement], Tensor] = {}
        self._parameters = [module._parameters[name] for module, name, _ in self._weights]
        for (module, name, held), parameter in zip(self._weights, self._parameters, strict=True):
            assert isinstance(parameter, DTensor)
            key = id(parameter), held.computes
            if key not in local:
                local[key] = _local(parameter, held)
            module._parameters[name] = local[key]

    def _remove(self, unit: nn.Module, args: object, output: object) -> None:
        for (module, name, _), parameter in zip(self._weights, self._parameters, strict=False):
            module._parameters[name] = parameter
        self._parameters = []


def _local(parameter: DTensor, held: _Held) -> Tensor:
    if held.computes != held.stored:
        parameter = parameter.redistribute(placements=[held.computes])
    local: Tensor = parameter.to_local(grad_placements=[held.gradient])
    return local if held.share == 1.0 else local * held.share


class _Flow:
    """What happens to hidden states [B, S, H] between the parts that the processes compute apart."""

    def __init__(self, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        self._mesh = mesh
        self._between = _POSITIONS if sequence_parallel else Replicate()
        self._length = 0

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """All positions for all processes; each gives a partial gradient."""
        return _first(args, kwargs, lambda hidden: self._moved(hidden, self._between, Replicate(), Partial()))

    def leave(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        """Partial sums added up."""
        return self._moved(output, Partial(), self._between, self._between)

    def note_length(self, block: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        """Positions before the split: of this pass, also where checkpointing repeats an earlier one."""
        self._length = kwargs["position_embeddings"][0].shape[-2]

    def begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """To each process its positions."""
        return _first(args, kwargs, lambda hidden: self._moved(hidden, Replicate(), _POSITIONS, _POSITIONS))

    def end(self, block: nn.Module, args: object, output: Tensor) -> Tensor:
        """All positions again; not a view, of which `fully_shard` warns."""
        return self._moved(output, _POSITIONS, Replicate(), Replicate()).clone()

    def _moved(self, hidden: Tensor, source: Placement, target: Placement, gradient: Placement) -> Tensor:
        shape = torch.Size([hidden.shape[0], self._length or hidden.shape[1], *hidden.shape[2:]])
        strides = (shape[1] * shape[2], shape[2], 1)
        given = DTensor.from_local(hidden, self._mesh, [source], run_check=False, shape=shape, stride=strides)
        moved: Tensor = given.redistribute(placements=[target]).to_local(grad_placements=[gradient])
        return moved


def _first(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The hidden states of a module's arguments changed: its first one, wherever it stands."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
