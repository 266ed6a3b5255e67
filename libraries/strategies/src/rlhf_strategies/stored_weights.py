"""Weights that stay in their files until a strategy reads the part of them which a process holds.

A model larger than a process is never whole in it: inside `weights_left_in_files`, `load_policy` makes the model with
`StoredParameter`s, and the strategy reads each one's own part (`StoredTensor.read`) once the model is sharded.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rlhf_core.errors import CheckpointError
from rlhf_models.causal_lm import loaded_by
from rlhf_models.folders import weight_files

from .shards import local_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def weights_left_in_files() -> AbstractContextManager[None]:
    """Context of building a model whose weights the strategy will read, part by part."""
    return loaded_by(load_stored)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file of safetensors."""

    file: Path
    name: str

    def read(self) -> Tensor:
        """Its values, mapped from the file: what is not used of them takes no memory."""
        try:
            with safe_open(str(self.file), framework="pt") as opened:
                found: Tensor = opened.get_tensor(self.name)
                return found
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.name} cannot be read: {error}", where=str(self.file)) from error

    def read_into(self, parameter: Tensor) -> None:
        """Write the values, of a sharded parameter this rank's part, into it; no communication."""
        with torch.no_grad():
            parameter.copy_(local_part(parameter, self.read()))


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


def load_stored(path: str, dtype: torch.dtype) -> PreTrainedModel | None:
    """The causal LM in the folder `path` with its weights left there, if that can be done.

    None: load it whole. That is a folder whose tensors transformers does not take over one by one (it merges or casts
    some of them), one that lacks some, and a hub's name.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    folder = Path(path)
    if not folder.is_dir():
        return None
    blanks: dict[str, Tensor] = {}
    places: dict[int, StoredTensor] = {}
    for stored, shape, its_dtype in _headers(folder):
        blanks[stored.name] = blank_tensor(shape, dtype if its_dtype.is_floating_point else its_dtype)
        places[blanks[stored.name].data_ptr()] = stored
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        kind: Any = type(AutoModelForCausalLM.from_config(config))
    model, info = kind.from_pretrained(None, config=config, state_dict=blanks, dtype=dtype, output_loading_info=True)
    if info["missing_keys"] or not _bind(model, places):
        return None
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(path)
    model.name_or_path = model.config.name_or_path = path
    return model  # type: ignore[no-any-return]


def _headers(folder: Path) -> Iterator[tuple[StoredTensor, list[int], torch.dtype]]:
    """Every tensor with its shape and type; no values are read."""
    for file in weight_files(folder):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                header = opened.get_slice(name)
                yield StoredTensor(file, name), header.get_shape(), _dtype(opened, name, header)


def _dtype(opened: Any, name: str, header: Any) -> torch.dtype:
    values: Tensor = header[:0] if header.get_shape() else opened.get_tensor(name)
    return values.dtype


def _bind(model: nn.Module, places: dict[int, StoredTensor]) -> bool:
    """Make the parameters stored ones and read the buffers; False where a parameter is none of the blank tensors."""
    made: dict[int, StoredParameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            stored = places.get(parameter.data_ptr())
            if stored is None:
                return False
            if id(parameter) not in made:
                made[id(parameter)] = StoredParameter.of(parameter.detach(), stored)
            setattr(module, name, made[id(parameter)])
        for buffer in module.buffers(recurse=False):
            if (stored := places.get(buffer.data_ptr())) is not None:
                buffer.copy_(stored.read())
    return True
