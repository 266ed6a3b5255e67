"""Model folders with transformers' layout: `model.safetensors`, or numbered files. Reading executes no code."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import CheckpointError

from .adapters import is_lora, merged_weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yields a folder beside `path` to be made and filled, which then takes its place; on error it is removed."""
    beside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        yield beside
        shutil.rmtree(path, ignore_errors=True)
        beside.rename(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_transformers_folder(model: Any, weights: dict[str, Tensor], path: Path) -> None:
    """Write `weights`, the full state of the transformers `model`, as a folder that `from_pretrained` reads, without
    PEFT: an adapter is merged.

    All are stored in the widest of their types, which `config.json` names, so that reading them does not round. The
    module's own type may be narrower (under ZeRO and Gemini it computes in 16 bits, as do its frozen weights).
    """
    if is_lora(model):
        model, weights = model.get_base_model(), merged_weights(model, weights)
    dtype = _widest(weights.values())
    widened = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    with quiet_progress():
        model.save_pretrained(path, state_dict=widened)
    write_model_config(model, dtype, path)


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder's weights, in order; none is []. A ColossalAI Booster's are `model-00001.safetensors`."""
    return sorted(folder.glob("model.safetensors")) or sorted(folder.glob("model-*.safetensors"))


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder, one at a time, on the CPU."""
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    files = weight_files(folder)
    if not files:
        raise CheckpointError("holds no model*.safetensors", where=str(folder), hint="give a folder `save_model` wrote")
    for path in files:
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot be read: {error}", where=str(path)) from error


def stored_dtype(folder: Path) -> torch.dtype:
    """The widest type among the floating-point tensors of a folder of weights."""
    return _widest(tensor for _, tensor in read_weights(folder))


def _widest(tensors: Iterable[Tensor]) -> torch.dtype:
    import torch

    return functools.reduce(torch.promote_types, {each.dtype for each in tensors if each.is_floating_point()})


def write_model_config(model: Any, dtype: torch.dtype, path: Path) -> None:
    """Write the `config.json` of the transformers `model` beside weights of type `dtype`, which it names."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(path)


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Silence transformers' progress bars for reading and writing weights, which would overwrite ours."""
    from transformers.utils import logging as of_transformers

    enabled = of_transformers.is_progress_bar_enabled()
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            of_transformers.enable_progress_bar()
