"""The weights of a model in a folder with transformers' layout: `model.safetensors`, or numbered files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.errors import CheckpointError
from rlhf_core.util.tensor_files import untied_names

if TYPE_CHECKING:
    from torch import Tensor, nn


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


def load_weights(model: nn.Module, folder: Path, put: Callable[[str, Tensor], None] | None = None) -> None:
    """Copy a folder's tensors into `model`, one at a time; names and shapes must match exactly.

    `put(name, tensor)` replaces the plain copy for a strategy with its own layout. Raises `CheckpointError` naming
    missing, unknown or differently shaped tensors.
    """
    import torch

    owners = untied_names(model)
    state = model.state_dict()
    seen: set[str] = set()
    for name, tensor in read_weights(folder):
        if name not in owners:
            raise CheckpointError(f"the model has no {name!r}", where=str(folder), hint="is it another model's folder?")
        target = state[name]
        if tuple(target.shape) != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)}, the model's is {tuple(target.shape)}", where=str(folder)
            )
        seen.add(owners[name])
        if put is not None:
            put(name, tensor)
        else:
            with torch.no_grad():
                target.copy_(tensor)
    missing = sorted(set(owners.values()) - seen)
    if missing:
        raise CheckpointError(f"lacks {len(missing)} tensors of the model: {', '.join(missing[:5])}", where=str(folder))
