"""Arbitrary columns of arbitrary samples for hypothesis, and their exact comparison."""

from __future__ import annotations

from typing import Any, get_args

import torch
from hypothesis import strategies as st

from rlhf_core.columns import Column, Columns, Dtype
from rlhf_core.types import BufferItem
from rlhf_testing.samples import make_item

NAMES = st.sampled_from(["novelty", "level", "of a judge", "$odd", "columns", "values"])
NUMBERS = st.floats(allow_nan=False)


@st.composite
def columns_of(draw: st.DrawFn, *, num_samples: int = 5) -> list[BufferItem]:
    """Draw samples in groups of two, all with the same columns, whose values are arbitrary bits."""
    kinds = draw(
        st.dictionaries(
            NAMES,
            st.builds(
                Column,
                per=st.sampled_from(["token", "sample", "prompt", "metrics"]),
                dtype=st.sampled_from(get_args(Dtype)),
                fill=st.sampled_from([0.0, 1.0]),
            ),
            max_size=4,
        )
    )
    tails = {name: draw(st.lists(st.integers(0, 3), max_size=2)) for name in kinds}
    bits = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    items = []
    of_prompt: dict[tuple[int, str], Any] = {}
    for sample in range(num_samples):
        length = draw(st.integers(1, 6))
        values: dict[str, Any] = {}
        for name, kind in kinds.items():
            if kind.per == "metrics":
                values[name] = draw(st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2))
            else:
                head = [length] if kind.per == "token" else []
                values[name] = any_bits([*head, *tails[name]], getattr(torch, kind.dtype), bits)
            if kind.per == "prompt":
                values[name] = of_prompt.setdefault((sample // 2, name), values[name])
        item = make_item(sample, group_id=sample // 2, num_actions=length)
        items.append(with_columns(item, Columns(values, kinds)))
    return items


def with_columns(item: BufferItem, columns: Columns) -> BufferItem:
    from dataclasses import replace

    return replace(item, columns=columns)


def any_bits(shape: list[int], dtype: torch.dtype, bits: torch.Generator) -> torch.Tensor:
    """Return random bits as a tensor, including NaN, infinities and subnormal numbers."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=bits).bool()
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, [*shape, size], generator=bits, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def assert_same_columns(one: BufferItem, other: BufferItem) -> None:
    ours, theirs = one.columns, other.columns
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        if ours.kinds[name].per == "metrics":
            assert theirs.kinds[name].per == "metrics"
            assert value == theirs[name] and isinstance(theirs[name], dict)
            continue
        assert ours.kinds[name] == theirs.kinds[name]
        assert (value.dtype, value.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert value.numpy().tobytes() == theirs[name].numpy().tobytes(), name
