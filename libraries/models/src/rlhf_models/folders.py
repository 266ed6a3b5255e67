"""Model folders in transformers' layout: `model.safetensors`, or numbered files. Reading does not execute any code."""

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
    """Write a folder next to `path` that replaces it at the end of the context. On error it is removed.

    Args:
        path: the folder to replace.

    Yields:
        Path of the temporary folder, which the caller creates and fills.

    Example:
        >>> with replacing_folder(Path("model")) as partial:
        ...     partial.mkdir()
        ...     _ = (partial / "config.json").write_text("{}")
        >>> [file.name for file in Path("model").iterdir()]
        ['config.json']
    """
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_transformers_folder(model: Any, weights: dict[str, Tensor], path: Path) -> None:
    """Write a model folder that `from_pretrained` loads without PEFT. A LoRA adapter is merged.

    All weights are stored in their widest type, which `config.json` records, so reading them does not round. The
    module's own type may be narrower (under ZeRO and Gemini it computes in 16 bits, and so do its frozen weights).

    Args:
        model: transformers model, possibly wrapped in PEFT adapters.
        weights: its full state, by name.
        path: folder to write.
    """
    if is_lora(model):
        model, weights = model.get_base_model(), merged_weights(model, weights)
    dtype = _widest_dtype(weights.values())
    widened = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    with quiet_progress():
        model.save_pretrained(path, state_dict=widened)
    write_model_config(model, dtype, path)


def weight_files(folder: Path) -> list[Path]:
    """Weight files of a folder, in order, [] if there are none. ColossalAI Boosters write `model-00001.safetensors`."""
    return sorted(folder.glob("model.safetensors")) or sorted(folder.glob("model-*.safetensors"))


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors of a model folder one at a time.

    Args:
        folder: folder with `model.safetensors` or numbered files.

    Yields:
        Name and tensor, on the CPU in its stored type.

    Raises:
        CheckpointError: weight files are missing or cannot be read.

    Example:
        >>> import torch
        >>> from safetensors.torch import save_file
        >>> save_file({"bias": torch.zeros(2)}, "model.safetensors")
        >>> [(name, tensor.tolist()) for name, tensor in read_weights(Path("."))]
        [('bias', [0.0, 0.0])]
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    files = weight_files(folder)
    if not files:
        raise CheckpointError("contains no model*.safetensors", where=str(folder), hint="use a folder of `save_model`")
    for path in files:
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot be read: {error}", where=str(path)) from error


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the widest type among the floating-point tensors of a model folder.

    Args:
        folder: folder with `model.safetensors` or numbered files.
    """
    return _widest_dtype(tensor for _, tensor in read_weights(folder))


def _widest_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    import torch

    return functools.reduce(torch.promote_types, {each.dtype for each in tensors if each.is_floating_point()})


def write_model_config(model: Any, dtype: torch.dtype, path: Path) -> None:
    """Write a model's `config.json` for weights of type `dtype`.

    Args:
        model: transformers model.
        dtype: type that the config records.
        path: model folder.
    """
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(path)


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Silence transformers' progress bars for reading and writing weights, which would overwrite ours.

    Yields:
        Nothing. The bars are enabled again afterwards if they were before.
    """
    from transformers.utils import logging as transformers_logging

    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
