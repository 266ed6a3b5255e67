"""Makes a model whose weights stay in the files of its folder (`strategies/stored_weights.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..strategies.stored_weights import StoredParameter, StoredTensor, are_weights_left_in_files, blank_tensor
from ..util.weight_files import weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_stored(path: str, dtype: torch.dtype) -> PreTrainedModel | None:
    """The causal LM in the folder `path` with its weights left there, if the context asks for that and it can be done.

    None: load it whole. That is a folder whose tensors transformers does not take over one by one (it merges or casts
    some of them), one that lacks some, and a hub's name.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    folder = Path(path)
    if not are_weights_left_in_files() or not folder.is_dir():
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
    from safetensors import safe_open

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
