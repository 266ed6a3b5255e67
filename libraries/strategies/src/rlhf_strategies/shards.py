"""Export of a model's weights from a strategy, in shards of bounded size and to files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rlhf_core.errors import CheckpointError
from rlhf_core.rollout import named_weights
from rlhf_core.util import write_tensors
from rlhf_core.util.tensor_files import untied_names
from rlhf_models import plain_weights, read_weights

from .checkpoint_files import CheckpointFiles

DEFAULT_SHARD_BYTES = 2 * 1024**3
_INDEX = "model.safetensors.index.json"


def plain_tensor(tensor: Tensor) -> Tensor:
    """The same memory without gradient or subclass. For example, `add_` does nothing on ColossalAI's ColoTensor."""
    if type(tensor) is torch.Tensor and not tensor.requires_grad:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor (collective). Any other tensor is returned as it is.

    Args:
        tensor: a tensor of a prepared model, its gradients or its optimizer.

    Returns:
        The full tensor.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(like: Tensor, value: Tensor) -> Tensor:
    """Return this rank's part of a full tensor, without communication.

    Args:
        like: a tensor of a prepared model, whose device and layout the part gets.
        value: the full tensor.
    """
    if not isinstance(like, DTensor):
        return value.to(like.device)
    local: DTensor = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    # The mesh of a GPU computes on it, while offloaded parameters are in host memory.
    return local.to(like.device)


def group_into_shards(tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Group tensors lazily into shards, in order. A tensor larger than `max_shard_bytes` is a separate shard.

    Args:
        tensors: names and tensors.
        max_shard_bytes: maximum size of a shard in bytes, at least 1.

    Yields:
        Shards of plain tensors by name.

    Raises:
        ValueError: `max_shard_bytes` is below 1.

    Example:
        >>> tensors = [("a", torch.zeros(2)), ("b", torch.zeros(1)), ("c", torch.zeros(4))]
        >>> [list(shard) for shard in group_into_shards(tensors, max_shard_bytes=12)]
        [['a', 'b'], ['c']]
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, not {max_shard_bytes}")
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        tensor = plain_tensor(tensor)
        num_bytes = tensor.numel() * tensor.element_size()
        if shard and size + num_bytes > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += num_bytes
        del tensor
    if shard:
        yield shard


def plain_shards(module: nn.Module, max_shard_bytes: int, *, merge: bool = True) -> Iterator[dict[str, Tensor]]:
    """Iterate over a module's weights under plain transformers names, tied tensors once, as other engines load them.

    Adapters are merged, and quantized weights are returned in float32. `module` is unchanged, so that adapters do not
    accumulate. Only one shard is duplicated at a time.

    Args:
        module: the policy, or the policy wrapped in PEFT adapters.
        max_shard_bytes: maximum size of a shard in bytes (or one tensor).
        merge: False leaves adapters out.

    Yields:
        Shards of tensors by name.
    """
    weights = named_weights(module)
    adapters = {name: tensor for name, tensor in weights.items() if "lora_" in name}
    others = ((name, tensor) for name, tensor in weights.items() if name not in adapters)
    yield from group_into_shards(plain_weights(module, others, adapters, merge=merge), max_shard_bytes)


def state_dict_shards_of(
    model: nn.Module,
    max_shard_bytes: int,
    only: Callable[[str], bool] | None = None,
    gather: Callable[[str, Tensor], Tensor] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Iterate over `model.state_dict()` in shards, tied tensors once.

    At most one shard and one more tensor are held in full at a time.

    Args:
        model: the model, possibly sharded over processes.
        max_shard_bytes: maximum size of a shard in bytes, at least 1.
        only: selects tensors by name, None for all.
        gather: returns the full tensor for a name and this process's tensor, possibly collectively. None if they are
            full already.

    Returns:
        An iterator of full plain tensors by name.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> [list(shard) for shard in state_dict_shards_of(model, max_shard_bytes=8)]
        [['weight'], ['bias']]
    """

    def wanted() -> Iterator[tuple[str, Tensor]]:
        owners = untied_names(model)
        for name, tensor in model.state_dict().items():
            if owners[name] == name and (only is None or only(name)):
                yield name, tensor if gather is None else gather(name, tensor)

    return group_into_shards(wanted(), max_shard_bytes)


def save_weights(
    folder: Path,
    shards: Iterable[Mapping[str, Tensor]],
    *,
    write: bool = True,
    files: CheckpointFiles | None = None,
) -> None:
    """Write shards one by one into a folder that transformers loads: one file, or numbered files with an index.

    Args:
        folder: The folder, which exists.
        shards: Parts of the state dict.
        write: Whether to write them. False (ranks other than 0) only gathers them.
        files: Writer, which may write later. None writes at once.
    """
    folder, files = Path(folder), files or CheckpointFiles()
    count = 0
    weight_map: dict[str, int] = {}
    total_bytes = 0
    for index, shard in enumerate(shards, start=1):
        count = index
        if write:
            tensors, part = files.snapshot(dict(shard)), folder / f"part-{index}.safetensors"
            files.write(partial(write_tensors, part, tensors, {"format": "pt"}))
            weight_map.update(dict.fromkeys(shard, index))
            total_bytes += sum(tensor.numel() * tensor.element_size() for tensor in shard.values())
    if write:
        files.write(lambda: _name_parts(folder, count, weight_map, total_bytes))


def _name_parts(folder: Path, count: int, weight_map: Mapping[str, int], total_bytes: int) -> None:
    """Rename the parts, and write an index of several ones."""
    for old in [*folder.glob("model.safetensors"), *folder.glob("model-*.safetensors"), folder / _INDEX]:
        old.unlink(missing_ok=True)
    names = {i: f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)}
    if count == 1:
        names = {1: "model.safetensors"}
    for index, name in names.items():
        (folder / f"part-{index}.safetensors").rename(folder / name)
    if count > 1:
        files = {name: names[index] for name, index in weight_map.items()}
        body = {"metadata": {"total_size": total_bytes}, "weight_map": files}
        (folder / _INDEX).write_text(json.dumps(body, indent=2) + "\n")


def load_weights(model: nn.Module, folder: Path, put: Callable[[str, Tensor, Tensor], object]) -> None:
    """Call `put(name, target, tensor)` for each tensor of a folder, with the model's `target` of that name.

    Names and shapes must match exactly: raises `CheckpointError` for missing, unknown or differently shaped tensors.
    """
    owners = untied_names(model)
    state = model.state_dict()
    seen: set[str] = set()
    for name, tensor in read_weights(folder):
        if name not in owners:
            raise CheckpointError(f"the model lacks {name!r}", where=str(folder), hint="is it another model's folder?")
        target = state[name]
        if tuple(target.shape) != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)}, the model's is {tuple(target.shape)}", where=str(folder)
            )
        seen.add(owners[name])
        put(name, target, tensor)
    missing = sorted(set(owners.values()) - seen)
    if missing:
        raise CheckpointError(f"lacks {len(missing)} tensors of the model: {', '.join(missing[:5])}", where=str(folder))
