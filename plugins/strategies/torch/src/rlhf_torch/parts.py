"""Parts of tensors that processes hold together: gathered, cut out of a whole, and read from a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from rlhf_strategies import StoredTensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor (collective); any other tensor is whole already."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(like: Tensor, value: Tensor) -> Tensor:
    """This rank's part of the full `value`, in the layout and type of `like`; no communication."""
    if not isinstance(like, DTensor):
        return value.to(like.device)
    local: DTensor = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return local


def read_part(parameter: Tensor, stored: StoredTensor) -> None:
    """Write this rank's part of a tensor in a file into `parameter`, which is sharded; no communication."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.numel():
        with torch.no_grad():
            local.copy_(stored.read(own_slices(parameter)))


def own_slices(tensor: Tensor) -> list[slice]:
    """The part of each dimension that this process holds."""
    slices = [slice(0, length) for length in tensor.shape]
    if not isinstance(tensor, DTensor):
        return slices
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    # `fully_shard` splits what tensor parallelism leaves, so the last dimension of the mesh splits first.
    for mesh_dim, placement in reversed(list(enumerate(tensor.placements))):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        whole = slices[dim]
        length = -(-(whole.stop - whole.start) // mesh.size(mesh_dim))
        start = min(whole.start + coordinate[mesh_dim] * length, whole.stop)
        slices[dim] = slice(start, min(start + length, whole.stop))
    return slices
