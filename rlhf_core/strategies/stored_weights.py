"""Weights that stay in their files until a strategy reads the part of them which a process holds.

A model larger than a process is never whole in it: inside `weights_left_in_files`, `load_policy` makes the model with
`StoredParameter`s, and the strategy reads each one's own part (`StoredTensor.read`) once the model is sharded.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError

_left = ContextVar("weights_left_in_files", default=False)


@contextmanager
def weights_left_in_files() -> Iterator[None]:
    """Context of building a model whose weights the strategy will read, part by part."""
    token = _left.set(True)
    try:
        yield
    finally:
        _left.reset(token)


def are_weights_left_in_files() -> bool:
    """Whether the model that is built now is for `StoredParameter`s."""
    return _left.get()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file of safetensors."""

    file: Path
    name: str

    def read(self, part: Sequence[slice] = ()) -> Tensor:
        """Its values, or those of a part, one slice a dimension; a copy, so that the file's pages can leave again."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(self.file), framework="pt") as opened:
                found: Tensor = opened.get_slice(self.name)[tuple(part) or ...]
                return found.clone(memory_format=torch.contiguous_format)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.name} cannot be read: {error}", where=str(self.file)) from error


class StoredParameter(nn.Parameter):
    """A parameter whose values are still in a file. What it has in memory are zeros that take no room until written."""

    stored: StoredTensor

    @classmethod
    def of(cls, blank: Tensor, stored: StoredTensor) -> StoredParameter:
        """`blank`: of the parameter's shape and type, from `blank_tensor`."""
        made: StoredParameter = cls(blank, requires_grad=blank.is_floating_point())
        made.stored = stored
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredParameter:
        """Another one of the same values (a critic begins as a copy of the policy's trunk)."""
        made = type(self).of(blank_tensor(self.shape, self.dtype), self.stored)
        memo[id(self)] = made.requires_grad_(self.requires_grad)
        return made


def blank_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in memory of their own, which the system provides as they are written."""
    num_values = torch.Size(shape).numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, num_values) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype, count=max(1, num_values))[:num_values].view(tuple(shape))


def stored_parameters(model: nn.Module) -> dict[str, StoredTensor]:
    """Name of each parameter of `model` whose values are still in a file -> where."""
    named = model.named_parameters()
    return {name: parameter.stored for name, parameter in named if isinstance(parameter, StoredParameter)}
