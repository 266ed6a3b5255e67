"""Stores trees of tensors and plain values in safetensors files.

A tree (optimizer state, random states, buffers) is one file: its tensors are the file's, its structure is JSON in the
header. Reading does not execute code (no pickle).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .files import replacing

if TYPE_CHECKING:
    from torch import Tensor, nn


_HEADER_KEY = "rlhf_tree"
_FORMAT = 1


def save_tree(path: Path | str, tree: Any) -> None:
    """Write `tree` to a file, atomically (first to a temporary file, then renamed).

    Args:
        path: the file to replace.
        tree: a tensor (any device, any dtype of safetensors), a bool, int, float, str, None, or a dict, list or tuple
            of trees. Any other value raises `CheckpointError`.

    Example:
        >>> save_tree("state.safetensors", {"step": 3, "betas": (0.9, 0.95)})
        >>> load_tree("state.safetensors")
        {'step': 3, 'betas': (0.9, 0.95)}
    """
    path = Path(path)
    tensors: dict[str, Tensor] = {}
    shape = _encode(tree, tensors, "tree")
    header = {_HEADER_KEY: json.dumps({"format": _FORMAT, "tree": shape})}
    write_tensors(path, tensors, header)


def load_tree(path: Path | str, device: str = "cpu") -> Any:
    """Read a file written by `save_tree`.

    Args:
        path: the file.
        device: device of the tensors.

    Returns:
        The tree, with tuples and dict keys as they were saved.

    Raises:
        CheckpointError: the file is invalid or cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        with safe_open(str(path), framework="pt", device=device) as file:
            header = (file.metadata() or {}).get(_HEADER_KEY)
            if header is None:
                raise CheckpointError("contains tensors, not a tree", where=str(path), hint="was it written by `rlhf`?")
            body = json.loads(header)
            if body.get("format") != _FORMAT:
                raise CheckpointError(f"format {body.get('format')}, this version reads {_FORMAT}", where=str(path))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return _decode(body["tree"], tensors)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(path), hint="use an older step-N") from error


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write one safetensors file atomically.

    Args:
        path: the file to replace. Its folder is created.
        tensors: name -> tensor. Tensors may be views, share memory or be on a device.
        metadata: text values for the header.

    Raises:
        CheckpointError: the file cannot be written, for example because the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            save_file(_make_storable(tensors), str(temporary), metadata=metadata)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk by its own error class
        raise CheckpointError(f"cannot be written: {error}", where=str(path), hint="is the disk full?") from error


def _make_storable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous CPU tensors without shared bytes, as safetensors requires. Copies only if needed."""
    seen: dict[int, list[tuple[int, int]]] = {}
    ready: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor.detach().contiguous()
        start, others = value.data_ptr(), seen.setdefault(value.untyped_storage().data_ptr(), [])
        end = start + value.nbytes
        overlaps = any(start < other_end and other_start < end for other_start, other_end in others)
        ready[name] = value.clone() if value.is_cpu and overlaps else value
        others.append((start, end))
    return {name: tensor.cpu() for name, tensor in ready.items()}


def _encode(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Return the tree as JSON values, with its tensors moved to `tensors`."""
    import torch

    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {"$tensor": name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        if plain:
            return {key: _encode(item, tensors, f"{where}.{key}") for key, item in value.items()}
        pairs = [
            [_encode(key, tensors, where), _encode(item, tensors, f"{where}[{key!r}]")] for key, item in value.items()
        ]
        return {"$dict": pairs}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, tensors, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    raise CheckpointError(
        f"a {type(value).__name__} cannot be stored", where=where, hint="store tensors, numbers, text, dicts and lists"
    )


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the tree that `_encode` encoded."""
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$tuple" in value:
        return tuple(_decode(item, tensors) for item in value["$tuple"])
    if "$dict" in value:
        return {_decode(key, tensors): _decode(item, tensors) for key, item in value["$dict"]}
    return {key: _decode(item, tensors) for key, item in value.items()}


def untied_names(model: nn.Module) -> dict[str, str]:
    """Return name in `model.state_dict()` -> name of its tensor. Tied tensors share the first one's name."""
    aliases: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names[name] = aliases.setdefault(id(tensor), name)
    return names
