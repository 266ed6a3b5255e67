"""The weights of a model in a folder with transformers' layout: `model.safetensors`, or numbered files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


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
