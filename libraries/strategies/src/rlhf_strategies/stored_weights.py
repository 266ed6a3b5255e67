"""Weights that stay in their files until a strategy reads the part that a process holds.

This way a process never holds all weights of a model larger than its memory. Inside `weights_left_in_files`,
`load_policy` builds the model with `StoredParameter`s. Once the model is sharded, the strategy reads this process's
part of each (`StoredTensor.read`).
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
    """Create a context in which models are built without reading their weights, for a strategy that reads parts later.

    Returns:
        The context for `load_policy`. Models built in it have `StoredParameter`s.
    """
    return loaded_by(load_stored)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: Path
    name: str

    def read(self) -> Tensor:
        """Return the values, memory-mapped from the file, so that unused parts do not take memory.

        Raises:
            CheckpointError: the file cannot be read.

        Example:
            >>> from safetensors.torch import save_file
            >>> save_file({"bias": torch.ones(2)}, "model.safetensors")
            >>> StoredTensor(Path("model.safetensors"), "bias").read()
            tensor([1., 1.])
        """
        try:
            with safe_open(str(self.file), framework="pt") as opened:
                values: Tensor = opened.get_tensor(self.name)
                return values
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.name} cannot be read: {error}", where=str(self.file)) from error

    def read_into(self, parameter: Tensor) -> None:
        """Copy the values into a parameter, for a sharded one only this rank's part. Does not communicate.

        Args:
            parameter: plain or sharded parameter with the stored shape.
        """
        with torch.no_grad():
            parameter.copy_(local_part(parameter, self.read()))


class StoredParameter(nn.Parameter):
    """A parameter whose values are still in a file. In memory it holds zeros that take up space only when written."""

    stored: StoredTensor

    @classmethod
    def of(cls, blank: Tensor, stored: StoredTensor) -> StoredParameter:
        """Create a parameter for a stored tensor.

        Args:
            blank: tensor from `blank_tensor`, with the parameter's shape and type.
            stored: location of the values.
        """
        parameter: StoredParameter = cls(blank, requires_grad=blank.is_floating_point())
        parameter.stored = stored
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredParameter:
        """Copy with the same stored values (a critic starts as a copy of the policy's trunk)."""
        copied = type(self).of(blank_tensor(self.shape, self.dtype), self.stored)
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return copied


def blank_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Create zeros in their own memory mapping, whose pages the system allocates only when written.

    Args:
        shape: shape of the tensor.
        dtype: type of the tensor.

    Returns:
        The tensor, on the CPU.

    Example:
        >>> blank_tensor((2, 2), torch.float32)
        tensor([[0., 0.],
                [0., 0.]])
    """
    num_values = torch.Size(shape).numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, num_values) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype, count=max(1, num_values))[:num_values].view(tuple(shape))


def stored_parameters(model: nn.Module) -> dict[str, StoredTensor]:
    """Return the location of each parameter whose values are still in a file, by name.

    Args:
        model: model built inside `weights_left_in_files`.
    """
    named = model.named_parameters()
    return {name: parameter.stored for name, parameter in named if isinstance(parameter, StoredParameter)}


def load_stored(path: str, dtype: torch.dtype) -> PreTrainedModel | None:
    """Build the causal LM of the folder `path` with its weights left in the files.

    Returns None if the model must be loaded in full: if transformers merges or casts some of the folder's tensors, if
    weights are missing, or if `path` is a hub name.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    folder = Path(path)
    if not folder.is_dir():
        return None
    blanks: dict[str, Tensor] = {}
    places: dict[int, StoredTensor] = {}
    for stored, shape, stored_dtype in _headers(folder):
        blanks[stored.name] = blank_tensor(shape, dtype if stored_dtype.is_floating_point else stored_dtype)
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
    """Every tensor with its shape and type, without reading values."""
    for file in weight_files(folder):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                header = opened.get_slice(name)
                yield StoredTensor(file, name), header.get_shape(), _dtype(opened, name, header)


def _dtype(opened: Any, name: str, header: Any) -> torch.dtype:
    values: Tensor = header[:0] if header.get_shape() else opened.get_tensor(name)
    return values.dtype


def _bind(model: nn.Module, places: dict[int, StoredTensor]) -> bool:
    """Replace the parameters with stored ones and read the buffers. False if a parameter is not a blank tensor."""
    bound: dict[int, StoredParameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            stored = places.get(parameter.data_ptr())
            if stored is None:
                return False
            if id(parameter) not in bound:
                bound[id(parameter)] = StoredParameter.of(parameter.detach(), stored)
            setattr(module, name, bound[id(parameter)])
        for buffer in module.buffers(recurse=False):
            if (stored := places.get(buffer.data_ptr())) is not None:
                buffer.copy_(stored.read())
    return True
