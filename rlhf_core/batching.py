"""Conversion between samples and batches: collate, split, and plan micro-batches."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from heapq import heappop, heappush
from typing import Any, TypeVar

import torch
from torch import Tensor

from .columns import Column, Columns
from .types import BufferItem, Experience

_FIELDS: Mapping[str, Column] = dict.fromkeys(
    ("reference_log_probs", "trainer_log_probs", "values", "advantages", "returns"), Column()
)
"""Optional per-token fields that `BufferItem` and `Experience` share."""
_MAX_IMBALANCE = 1.02
"""Maximum ratio of the longest part to that of the greedy split at which adjacent rows are kept together."""
_LARGE_MODEL_PARAMETERS = 50_000_000
UnitT = TypeVar("UnitT")
DataT = TypeVar("DataT")


def default_micro_batch_tokens(device_type: str, num_parameters: int = 0) -> int:
    """Return the default maximum number of tokens of one forward pass.

    On a CPU, more tokens cost memory and are hardly faster: matrix products of a large model reach nearly full speed
    at 192 rows (`benchmarks/memory.md`), while a small model is limited by the overhead of calls and needs more. The
    value for a GPU keeps it busy.

    Args:
        device_type: `cpu`, `cuda` or another torch device type.
        num_parameters: Parameters of the model.

    Example:
        >>> [default_micro_batch_tokens("cpu", size) for size in (1_000_000, 500_000_000)]
        [1024, 192]
    """
    if device_type != "cpu":
        return 16384
    return 192 if fills_host_memory(device_type, num_parameters) else 1024


def fills_host_memory(device_type: str, num_parameters: int) -> bool:
    """Whether the model is large enough that training on this device should save host memory if that costs little."""
    return device_type == "cpu" and num_parameters >= _LARGE_MODEL_PARAMETERS


def collate(items: Sequence[BufferItem], *, with_inputs: bool = True) -> Experience:
    """Pad samples to their longest prompt and longest response, and stack them on their device.

    Padding is 0, but -1 in `support_ids` and `fill` in columns. Only the masks distinguish padding from real tokens.

    Args:
        items: At least one. An optional field or column must be set in all items or in none, except `support_ids`,
            which a sample without truncated sampling lacks, and columns that are declared `optional`.
        with_inputs: Whether to include columns that are model inputs. Their values may differ in shape, and are padded
            in every dimension. Values per token may differ after their first dimension, and are padded, too.

    Returns:
        A batch of B = `len(items)` rows in the same order. See `Experience` for shapes and dtypes.

    Raises:
        ValueError: `items` is empty, or items differ in their fields, reward names or column shapes.

    Example:
        >>> def item(prompt: list[int], response: list[int]) -> BufferItem:
        ...     tokens, zeros = torch.tensor(response), torch.zeros(len(response))
        ...     return BufferItem(sample_id=0, group_id=0, policy_version=0, prompt_ids=torch.tensor(prompt),
        ...                       response_ids=tokens, action_mask=tokens > 0, action_log_probs=zeros)
        >>> batch = collate([item([5, 6], [7]), item([8], [9, 2])])
        >>> batch.sequences.tolist()  # prompts padded left, responses padded right
        [[5, 6, 7, 0], [0, 8, 9, 2]]
    """
    if not items:
        raise ValueError("collate needs at least one item")
    prompt_width = max(item.prompt_ids.numel() for item in items)
    action_width = max(item.num_response_tokens for item in items)
    device = items[0].prompt_ids.device
    sequences = torch.zeros(len(items), prompt_width + action_width, dtype=torch.int64, device=device)
    attention_mask = torch.zeros(sequences.shape, dtype=torch.bool, device=device)
    for row, item in enumerate(items):
        start, end = prompt_width - item.prompt_ids.numel(), prompt_width + item.num_response_tokens
        sequences[row, start:prompt_width] = item.prompt_ids
        sequences[row, prompt_width:end] = item.response_ids
        attention_mask[row, start:end] = True

    def column(name: str, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor([getattr(item, name) for item in items], dtype=dtype, device=device)

    def optional(name: str) -> Tensor | None:
        rows = [getattr(item, name) for item in items]
        return column(name, torch.float32) if _all_have(f"`{name}`", items, rows) else None

    fields = {name: (kind, [getattr(item, name) for item in items]) for name, kind in _FIELDS.items()}
    kinds = {n: k for item in items for n, k in item.columns.kinds.items() if with_inputs or not k.model_input}
    values = {
        name: _stack(f"column {name!r}", kind, items, [item.columns.get(name) for item in items], action_width)
        for name, kind in kinds.items()
    }

    return Experience(
        sequences=sequences,
        attention_mask=attention_mask,
        action_mask=_pad([item.action_mask for item in items], action_width, torch.bool),
        action_log_probs=_pad([item.action_log_probs for item in items], action_width, torch.float32),
        sample_ids=column("sample_id"),
        group_ids=column("group_id"),
        policy_versions=column("policy_version"),
        truncated=column("truncated", torch.bool),
        rewards=_collate_rewards(items),
        support_ids=_collate_support(items, action_width),
        kl_coef=optional("kl_coef"),
        scores=optional("score"),
        branches=column("branch") if any(item.branch for item in items) else None,
        columns=Columns(values, kinds),
        **{name: _stack(f"`{name}`", kind, items, rows, action_width) for name, (kind, rows) in fields.items()},
    )


def split(experience: Experience, *, to_cpu: bool = True) -> list[BufferItem]:
    """Split a batch into its samples, the inverse of `collate`.

    Args:
        experience: A batch of B rows.
        to_cpu: Whether to copy the samples to the CPU. Otherwise they stay on the batch's device.

    Returns:
        B unpadded copies in order. Scalars such as rewards have float32 precision, and `support_ids` lack columns that
        were padding only.
    """
    if to_cpu:
        experience = to_device(experience, torch.device("cpu"))
    return [_item(experience, row) for row in range(len(experience))]


def to_device(batch: DataT, device: torch.device) -> DataT:
    """Return a copy of a batch or sample with every tensor on a device. Copies to an accelerator are asynchronous.

    Args:
        batch: A dataclass. Tensors in nested dataclasses, mappings and columns are moved, too.
        device: The target.
    """
    # A non-blocking copy to the CPU could be read before it is complete.
    return _map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))


def pin_memory(batch: DataT) -> DataT:
    """Return a copy of a batch with its CPU tensors in page-locked memory, so that copies to a GPU are asynchronous.

    Args:
        batch: A dataclass, as for `to_device`.
    """
    return _map_tensors(batch, lambda tensor: tensor.pin_memory() if tensor.is_cpu else tensor)


def masked(item: BufferItem) -> BufferItem:
    """Return the sample with an empty action mask."""
    return replace(item, action_mask=torch.zeros_like(item.action_mask))


def plan_micro_batches(
    units: Sequence[UnitT], max_tokens: int | None, price: Callable[[Sequence[UnitT]], int] | None = None
) -> list[list[int]]:
    """Split units into micro-batches of similar lengths, to keep padding small.

    Args:
        units: Lengths in tokens, or any objects that `price` accepts.
        max_tokens: Maximum price of a micro-batch. A unit with a higher price runs alone. None puts all units into one.
        price: Units -> cost of one forward pass over them, in tokens. By default their number times the longest.

    Returns:
        Lists of indices into `units`, each index once. The highest prices come first, so that a lack of memory is
        noticed at once.

    Raises:
        ValueError: `max_tokens` is below 1.

    Example:
        >>> plan_micro_batches([3, 10, 4, 9], max_tokens=20)
        [[1, 3], [2, 0]]
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
    price_of: Callable[[Sequence[Any]], int] = price or (lambda lengths: len(lengths) * max(lengths))
    rest = sorted(range(len(units)), key=lambda i: (-price_of(units[i : i + 1]), i))

    def is_too_large(size: int) -> bool:
        return max_tokens is not None and price_of([units[index] for index in rest[:size]]) > max_tokens

    batches: list[list[int]] = []
    while rest:
        size = 1
        while size < len(rest) and not is_too_large(2 * size):
            size *= 2
        # The price never decreases with the size, so bisection finds the largest size that fits.
        size += bisect(range(size + 1, min(2 * size, len(rest) + 1)), False, key=is_too_large)
        batches.append(rest[:size])
        rest = rest[size:]
    return batches


def balanced(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Split indices into `lengths` (tokens) into parts with about equal sums, each part in ascending order.

    Adjacent rows are kept together if that is nearly as even, since they are answers to one prompt and are sent as one
    object. Otherwise each length, longest first, goes to the part with the smallest sum so far (Graham 1969), the first
    of them if several are equal.
    """
    loads = [(0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, part = heappop(loads)
        parts[part].append(index)
        heappush(loads, (load + lengths[index], part))
    adjacent = _cut(lengths, num_parts)
    longest = max(sum(lengths[index] for index in part) for part in adjacent)
    if all(adjacent) and longest <= _MAX_IMBALANCE * max(load for load, _ in loads):
        return adjacent
    return [sorted(part) for part in parts]


def _cut(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Cut the indices, in order, into parts with about equal sums: the midpoint of each length determines its part."""
    total, before = max(1, sum(lengths)), 0
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index, length in enumerate(lengths):
        parts[min(num_parts - 1, (2 * before + length) * num_parts // (2 * total))].append(index)
        before += length
    return parts


def _item(experience: Experience, row: int) -> BufferItem:
    width = experience.prompt_length
    real = experience.attention_mask[row]
    start = width - int(real[:width].sum())
    length = int(real[width:].sum())

    def tokens(values: Tensor) -> Tensor:
        return values[row, :length].clone()

    def scalar(values: Tensor | None) -> float | None:
        return None if values is None else float(values[row])

    def value(values: Any, kind: Column) -> Any:
        if kind.per == "metrics":
            return values[row]
        return tokens(values) if kind.per == "token" else values[row].clone()

    fields = {name: getattr(experience, name) for name in _FIELDS}
    per_token: dict[str, Any] = {name: tokens(values) for name, values in fields.items() if values is not None}
    return BufferItem(
        sample_id=int(experience.sample_ids[row]),
        group_id=int(experience.group_ids[row]),
        policy_version=int(experience.policy_versions[row]),
        prompt_ids=experience.sequences[row, start:width].clone(),
        response_ids=experience.sequences[row, width : width + length].clone(),
        action_mask=tokens(experience.action_mask),
        action_log_probs=tokens(experience.action_log_probs),
        rewards={name: float(scores[row]) for name, scores in experience.rewards.items()},
        support_ids=None if experience.support_ids is None else _trim_support(tokens(experience.support_ids)),
        truncated=bool(experience.truncated[row]),
        kl_coef=scalar(experience.kl_coef),
        score=scalar(experience.scores),
        branch=0 if experience.branches is None else int(experience.branches[row]),
        columns=experience.columns.map(value),
        **per_token,
    )


def _pad(rows: Sequence[Tensor], width: int, dtype: torch.dtype, fill: float = 0.0) -> Tensor:
    inner = [max(sizes) for sizes in zip(*(row.shape[1:] for row in rows), strict=True)]
    padded = torch.full((len(rows), width, *inner), fill, dtype=dtype, device=rows[0].device)
    for place, values in zip(padded, rows, strict=True):
        place[tuple(map(slice, values.shape))] = values
    return padded


def _all_have(label: str, items: Sequence[BufferItem], rows: Sequence[Any]) -> bool:
    """Whether all items have a value. Raises `ValueError` if only some have."""
    missing = [item.sample_id for item, row in zip(items, rows, strict=True) if row is None]
    if missing and len(missing) < len(rows):
        raise ValueError(f"{label} is set for some samples of a batch and missing for {missing[:8]}")
    return not missing


def _stack(label: str, kind: Column, items: Sequence[BufferItem], rows: Sequence[Any], width: int) -> Any:
    """Return the batch's value of a field or column from the items' values, or None if the items lack it."""
    is_filled = kind.optional and kind.per != "metrics" and any(row is not None for row in rows)
    if not is_filled and not _all_have(label, items, rows):
        return None
    if kind.per == "metrics":
        return tuple(rows)
    first: Tensor = next(row for row in rows if row is not None)
    if kind.model_input and any(row.shape != first.shape for row in rows):
        return _pad(rows, max(map(len, rows)), first.dtype, kind.fill)
    checked = 1 if kind.per == "token" else None  # the shape after a token may differ
    shapes = [(item.num_response_tokens, *first.shape[1:]) if checked else first.shape for item in items]
    filled = [first.new_full(s, kind.fill) if row is None else row for row, s in zip(rows, shapes, strict=True)]
    for item, row, shape in zip(items, filled, shapes, strict=True):
        if row.ndim != first.ndim or row.shape[:checked] != shape[:checked]:
            raise ValueError(
                f"{label}, per {kind.per}, has the shape {list(row.shape)} for sample {item.sample_id} of "
                f"{item.num_response_tokens} response tokens, {list(filled[0].shape)} for sample {items[0].sample_id}"
            )
    return torch.stack(filled) if kind.per != "token" else _pad(filled, width, getattr(torch, kind.dtype), kind.fill)


def _collate_rewards(items: Sequence[BufferItem]) -> Mapping[str, Tensor]:
    names = list(items[0].rewards)
    for item in items:
        if set(item.rewards) != set(names):
            raise ValueError(
                f"sample {item.sample_id} has rewards {sorted(item.rewards)}, "
                f"sample {items[0].sample_id} of the same batch has {sorted(names)}"
            )
    device = items[0].prompt_ids.device
    return {
        name: torch.tensor([item.rewards[name] for item in items], dtype=torch.float32, device=device) for name in names
    }


def _collate_support(items: Sequence[BufferItem], width: int) -> Tensor | None:
    kept = [item.support_ids for item in items]
    num_kept = max((support.shape[1] for support in kept if support is not None), default=0)
    if num_kept == 0:
        return None
    device = items[0].prompt_ids.device
    padded = torch.full((len(items), width, num_kept), -1, dtype=torch.int32, device=device)
    for row, support in enumerate(kept):
        if support is not None:
            padded[row, : support.shape[0], : support.shape[1]] = support
    return padded


def _trim_support(support: Tensor) -> Tensor | None:
    used = (support >= 0).any(0).nonzero()
    return support[:, : int(used[-1]) + 1].clone() if used.numel() else None


def _map_tensors(batch: DataT, change: Callable[[Tensor], Tensor]) -> DataT:
    def changed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, Columns):
            return value.map(lambda each, kind: changed(each))
        if isinstance(value, Mapping):
            return {name: changed(each) for name, each in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{each.name: changed(getattr(value, each.name)) for each in fields(value)})
        return value

    copy: DataT = changed(batch)
    return copy
