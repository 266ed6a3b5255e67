"""Samples to batches and back, and micro-batch plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.batching import collate, default_micro_batch_tokens, masked, plan_micro_batches, split, to_device
from rlhf_core.types import BufferItem

SCORE = st.floats(-10, 10, width=32)


def assert_same(one: object, other: object) -> None:
    for field in fields(one):  # type: ignore[arg-type]
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, torch.Tensor):
            assert isinstance(right, torch.Tensor), field.name
            assert left.dtype == right.dtype and torch.equal(left, right), field.name
        elif field.name == "rewards":
            assert set(left) == set(right)
            assert all(torch.equal(torch.as_tensor(left[name]), torch.as_tensor(right[name])) for name in left)
        else:
            assert left == right, field.name


@st.composite
def items(draw: st.DrawFn) -> list[BufferItem]:
    optional = {name: draw(st.booleans()) for name in ("reference", "values", "support", "kl_coef", "score", "made")}
    return [_item(draw, sample_id, optional) for sample_id in range(draw(st.integers(1, 5)))]


def _item(draw: st.DrawFn, sample_id: int, has: dict[str, bool]) -> BufferItem:
    prompt, response = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def numbers(wanted: bool) -> torch.Tensor | None:
        return torch.randn(response, generator=random) if wanted else None

    support = None
    if has["support"] and response:
        support = torch.randint(-1, 9, (response, draw(st.integers(1, 3))), generator=random, dtype=torch.int32)
        support[-1] = 3
    log_probs = numbers(True)
    assert log_probs is not None
    return BufferItem(
        sample_id=sample_id,
        group_id=sample_id // 2,
        policy_version=draw(st.integers(0, 9)),
        prompt_ids=torch.randint(0, 9, (prompt,), generator=random),
        response_ids=torch.randint(0, 9, (response,), generator=random),
        action_mask=torch.randint(0, 2, (response,), generator=random).bool(),
        action_log_probs=log_probs,
        rewards={"right": draw(SCORE), "brief": draw(SCORE)},
        reference_log_probs=numbers(has["reference"]),
        values=numbers(has["values"]),
        support_ids=support,
        truncated=draw(st.booleans()),
        kl_coef=draw(SCORE) if has["kl_coef"] else None,
        score=draw(SCORE) if has["score"] else None,
        advantages=numbers(has["made"]),
        returns=numbers(has["made"]),
    )


def simple(sample_id: int, prompt: list[int], response: list[int]) -> BufferItem:
    return BufferItem(
        sample_id=sample_id,
        group_id=sample_id,
        policy_version=0,
        prompt_ids=torch.tensor(prompt),
        response_ids=torch.tensor(response),
        action_mask=torch.ones(len(response), dtype=torch.bool),
        action_log_probs=-torch.ones(len(response)),
    )


def test_prompts_are_padded_left_and_responses_right() -> None:
    batch = collate([simple(0, [1, 2], [3]), simple(1, [4], [0, 0])])
    assert batch.sequences.tolist() == [[1, 2, 3, 0], [0, 4, 0, 0]]
    assert batch.attention_mask.tolist() == [[True, True, True, False], [False, True, True, True]]
    assert batch.action_mask.tolist() == [[True, False], [True, True]]
    assert batch.action_log_probs.tolist() == [[-1.0, 0.0], [-1.0, -1.0]]
    assert (len(batch), batch.prompt_length, batch.num_actions) == (2, 2, 2)
    assert batch.support_ids is None and batch.values is None and batch.kl_coef is None


@given(items())
def test_split_undoes_collate(samples: list[BufferItem]) -> None:
    batch = collate(samples)
    back = split(batch)
    assert len(back) == len(samples)
    for one, other in zip(samples, back, strict=True):
        assert_same(one, other)
    assert_same(batch, collate(back))


def test_split_gives_copies() -> None:
    batch = collate([simple(0, [1], [2])])
    split(batch)[0].action_log_probs[0] = 5.0
    assert batch.action_log_probs.tolist() == [[-1.0]]


def test_a_sample_without_support_was_drawn_from_the_whole_vocabulary() -> None:
    truncated = replace(simple(0, [1], [2]), support_ids=torch.tensor([[2, 3]], dtype=torch.int32))
    batch = collate([truncated, simple(1, [1], [2])])
    assert batch.support_ids is not None and batch.support_ids.dtype == torch.int32
    assert batch.support_ids.tolist() == [[[2, 3]], [[-1, -1]]]
    assert split(batch)[1].support_ids is None


def test_masked_counts_for_nothing() -> None:
    before = simple(0, [1], [2, 3])
    after = masked(before)
    assert not after.action_mask.any() and before.action_mask.all()
    assert_same(replace(after, action_mask=before.action_mask), before)


def test_to_device_moves_every_tensor() -> None:
    batch = replace(collate([replace(simple(0, [1], [2]), rewards={"a": 1.0})]), scores=torch.ones(1))
    moved = to_device(batch, torch.device("meta"))
    tensors = [getattr(moved, f.name) for f in fields(moved)] + list(moved.rewards.values())
    assert {t.device.type for t in tensors if isinstance(t, torch.Tensor)} == {"meta"}
    assert moved.scores is not None and moved.values is None


def test_samples_that_do_not_match_are_named() -> None:
    with pytest.raises(ValueError, match="at least one"):
        collate([])
    with pytest.raises(ValueError, match=r"`values` .* missing for \[7\]"):
        collate([replace(simple(0, [1], [2]), values=torch.ones(1)), simple(7, [1], [2])])
    with pytest.raises(ValueError, match=r"sample 1 has rewards \['b'\]"):
        collate([replace(simple(i, [1], [2]), rewards={name: 1.0}) for i, name in enumerate("ab")])


@given(st.lists(st.integers(1, 40), max_size=30), st.one_of(st.none(), st.integers(1, 100)))
def test_plans_cover_everything_once_within_the_budget(lengths: list[int], budget: int | None) -> None:
    plan = plan_micro_batches(lengths, budget)
    assert sorted(index for rows in plan for index in rows) == list(range(len(lengths)))
    for rows in plan:
        cost = len(rows) * max(lengths[i] for i in rows)
        assert budget is None or cost <= budget or len(rows) == 1
    assert plan == plan_micro_batches(lengths, budget)
    if budget is None:
        assert len(plan) == bool(lengths)


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), max_size=30), st.integers(1, 200))
def test_units_are_planned_by_their_price_one_after_the_other(units: list[list[int]], budget: int) -> None:
    def price(chosen: Sequence[list[int]]) -> int:
        rows = [row for unit in chosen for row in unit]
        return len(rows) * max(rows)

    expected: list[list[int]] = []
    for index in sorted(range(len(units)), key=lambda i: (-price([units[i]]), i)):
        if expected and price([units[i] for i in [*expected[-1], index]]) <= budget:
            expected[-1].append(index)
        else:
            expected.append([index])
    assert plan_micro_batches(units, budget, price) == expected


def test_plans_put_like_lengths_together() -> None:
    assert plan_micro_batches([2, 9, 2, 8, 30, 2], 18) == [[4], [1, 3], [0, 2, 5]]
    with pytest.raises(ValueError, match="max_tokens"):
        plan_micro_batches([1], 0)


def test_a_large_model_takes_fewer_tokens_a_pass_on_a_cpu() -> None:
    assert default_micro_batch_tokens("cpu") == default_micro_batch_tokens("cpu", 10_000_000) == 1024
    assert default_micro_batch_tokens("cpu", 135_000_000) == 192
    assert default_micro_batch_tokens("cuda", 135_000_000) == default_micro_batch_tokens("cuda") == 16384
