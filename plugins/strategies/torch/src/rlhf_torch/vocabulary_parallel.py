"""Vocabulary parallelism: each process of a tensor-parallel group holds some rows of embedding and head.

A token's embedding comes from the process that holds its row, and the others add zeros. The head computes each
process's part of the logits. Log-probs and entropy need only three numbers per token from the other processes
(`VocabularyPart`), so they are computed without gathering logits (Shoeybi 2019, arXiv:1909.08053, section 3). Callers
that need all logits get them gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional

from rlhf_passes import VocabularyPart

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split_vocabulary(model: nn.Module, mesh: DeviceMesh) -> set[int]:
    """Make embedding and head of `model` compute with this process's rows. Returns the `id`s of these modules."""
    modules = vocabulary_modules(model, mesh.size())
    for module in modules:
        if isinstance(module, nn.Embedding):
            module.forward = _Embedding(module, mesh).forward  # type: ignore[method-assign, assignment]
        else:
            module.forward = _Head(module, mesh).forward  # type: ignore[method-assign, assignment]
            part: Any = VocabularyPart(_start(module.out_features, mesh), mesh.get_group())
            module.vocabulary_part = part
    return {id(module) for module in modules}


def vocabulary_modules(model: nn.Module, size: int) -> list[nn.Embedding | nn.Linear]:
    """Embedding and head whose rows `size` processes can share equally.

    Modules of other classes (an adapter around the head, a scaled embedding) are excluded.
    """
    modules: list[nn.Embedding | nn.Linear] = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        get = getattr(model, name, None)
        module = get() if callable(get) else None
        if not isinstance(module, (nn.Embedding, nn.Linear)) or type(module) not in (nn.Embedding, nn.Linear):
            continue
        if module.weight.shape[0] % size == 0:
            modules.append(module)
    return modules


def _start(num_rows: int, mesh: DeviceMesh) -> int:
    """Index of the first row that this process holds."""
    return num_rows // mesh.size() * mesh.get_local_rank()


class _Embedding:
    """Token ids [B, S] -> hidden states [B, S, H], complete in each process."""

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh) -> None:
        self._embedding, self._mesh = embedding, mesh
        self._start = _start(embedding.num_embeddings, mesh)
        self._num_rows = embedding.num_embeddings // mesh.size()

    def forward(self, ids: Tensor) -> Tensor:
        own = ids - self._start
        is_here = (own >= 0) & (own < self._num_rows)
        padding = self._embedding.padding_idx
        if padding is not None:
            padding -= self._start
            padding = padding if 0 <= padding < self._num_rows else None
        rows = functional.embedding(own.masked_fill(~is_here, 0), self._embedding.weight, padding)
        rows = rows * is_here.unsqueeze(-1)
        return _redistribute(rows, self._mesh, Partial(), Replicate(), Replicate())


class _Head:
    """Hidden states [..., H] -> all logits [..., V] in each process."""

    def __init__(self, head: nn.Linear, mesh: DeviceMesh) -> None:
        self._head, self._mesh = head, mesh

    def forward(self, hidden: Tensor) -> Tensor:
        inputs = _redistribute(hidden, self._mesh, Replicate(), Replicate(), Partial())
        part = functional.linear(inputs, self._head.weight, self._head.bias)
        across = Shard(part.ndim - 1)
        # The clone avoids a view, about which `fully_shard` warns.
        return _redistribute(part, self._mesh, across, Replicate(), Replicate()).clone()


def _redistribute(local: Tensor, mesh: DeviceMesh, source: Placement, target: Placement, gradient: Placement) -> Tensor:
    sharded: Any = DTensor.from_local(local, mesh, [source], run_check=False)
    result: Tensor = sharded.redistribute(placements=[target]).to_local(grad_placements=[gradient])
    return result
