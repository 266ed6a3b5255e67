"""Shared beginnings, laid out once, give the numbers and gradients of separate rows, model by model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_passes import VOCABULARY, assert_same, build, packed_passes, run
from torch import Tensor, nn

from rlhf_core.batching import collate, default_micro_batch_tokens
from rlhf_core.models.forward_passes import ForwardPasses
from rlhf_core.place import LocalPlace
from rlhf_core.types import BufferItem, Experience
from rlhf_forward import value_forward
from rlhf_forward.architectures import with_trait
from rlhf_forward.forward import model_rows
from rlhf_models.gradient_checkpointing import enable_gradient_checkpointing
from rlhf_passes import fast_passes, shared_rows
from rlhf_passes.fast_passes import FastPasses
from rlhf_passes.packing import PackedRows
from rlhf_passes.prefix_tree import PrefixTree
from rlhf_passes.shared_plan import shared_plan
from rlhf_passes.shared_rows import SharedRows
from rlhf_passes.tree_attention import Blocks, tree_attention
from rlhf_passes.varlen_blocks import VarlenBlock
from rlhf_ppo import Critic

Lengths = Sequence[tuple[int, Sequence[int]]]
"""Prompt length and answer lengths of each group."""
GROUPS: Lengths = [(20, (7, 3, 11, 1)), (9, (5, 5, 2)), (30, (4,)), (17, (6, 6))]


def tokens(count: int, seed: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def plan(
    units: Sequence[Sequence[BufferItem]],
    max_tokens: int | None,
    model: nn.Module,
    passes: type[ForwardPasses] = FastPasses,
) -> list[list[int]]:
    return passes().plan(units, max_tokens, LocalPlace(torch.device("cpu"), torch.float32), model)


def item(index: int, prompt: Tensor, answer: Tensor, *, group: int = 0, branch: int = 0) -> BufferItem:
    acts = torch.ones(len(answer), dtype=torch.bool)
    acts[len(answer) // 2] = len(answer) < 3
    return BufferItem(
        sample_id=index,
        group_id=group,
        policy_version=0,
        prompt_ids=prompt,
        response_ids=answer,
        action_mask=acts,
        action_log_probs=torch.zeros(len(answer)),
        branch=branch,
    )


def groups(lengths: Lengths) -> list[BufferItem]:
    found: list[BufferItem] = []
    for group, (prompt, answers) in enumerate(lengths):
        for answer in answers:
            index = len(found)
            found.append(item(index, tokens(prompt, group), tokens(answer, 100 + index), group=group))
    return found


def branches() -> list[BufferItem]:
    """Two episodes with the same prompt. Rows share turns, are beginnings of others, or are equal."""
    prompt, turns = tokens(19, 0), [tokens(18, seed) for seed in range(1, 7)]
    answers = [turns[:1], turns[:2], [*turns[:2], turns[2]], [*turns[:2], turns[3]], turns[4:5], turns[4:6], turns[4:6]]
    return [item(index // 4, prompt, torch.cat(each), branch=index % 4) for index, each in enumerate(answers)]


def shared(experience: Experience, model: nn.Module) -> list[Tensor]:
    """`run` with shared beginnings, and assert that there are some."""
    with packed_passes(model):
        rows = model_rows(getattr(model, "base_model", model), experience)
    found = run(model, experience, packed=True)
    assert rows.inputs["input_ids"].numel() < experience.attention_mask.sum()
    return found


@pytest.fixture
def without_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over rows, as on devices other than the CPU."""
    monkeypatch.setattr(shared_rows, "can_attend", lambda *_: False)


@pytest.mark.parametrize("model_type", sorted(with_trait("packs")))
@pytest.mark.parametrize("made", [lambda: groups(GROUPS), branches], ids=["answers", "branches"])
def test_log_probs_and_gradients_of_every_family(model_type: str, made: Any) -> None:
    model, experience = build(model_type), collate(made())
    assert_same(shared(experience, model), run(model, experience, packed=False))


@pytest.mark.parametrize("made", [lambda: groups(GROUPS), branches], ids=["answers", "branches"])
@pytest.mark.usefixtures("without_blocks")
def test_attention_over_rows(made: Any) -> None:
    model, experience = build(), collate(made())
    assert_same(shared(experience, model), run(model, experience, packed=False))


@pytest.mark.parametrize("window", [1, 5, 26, 40])
def test_a_sliding_window(window: int) -> None:
    model, experience = build("mistral", sliding_window=window), collate(groups(GROUPS))
    assert_same(shared(experience, model), run(model, experience, packed=False))


LENGTHS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=5)), min_size=1, max_size=4
)


@given(LENGTHS, st.integers(1, 30))
@settings(deadline=None, max_examples=40)
def test_attention_of_any_groups(lengths: Lengths, min_saved: int) -> None:
    rows = [torch.cat([each.prompt_ids, each.response_ids]) for each in groups(lengths)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).numpy()
    tree = PrefixTree.of(ids, [len(row) for row in rows], min_saved=min_saved)
    assert_attention(tree, [len(row) for row in rows])


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=9), st.integers(1, 9))
@settings(deadline=None)
def test_a_tree_has_all_rows_and_no_token_twice_for_nothing(rows: list[list[int]], min_saved: int) -> None:
    lengths = [len(row) for row in rows]
    ids = np.array([row + [0] * (max(lengths) - len(row)) for row in rows])
    tree = PrefixTree.of(ids, lengths, min_saved=min_saved)
    flat = ids.flatten()[tree.sources]
    for row, places in zip(rows, tree.places, strict=True):
        assert flat[places[: len(row)]].tolist() == row
    used = {place for row, places in zip(rows, tree.places, strict=True) for place in places[: len(row)].tolist()}
    assert used == set(range(len(tree.sources)))
    assert [place for each in tree.segments for place in range(each.start, each.stop)] == sorted(used)
    if min_saved == 1:
        assert len(tree.sources) == len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})


def assert_attention(tree: PrefixTree, lengths: Sequence[int]) -> None:
    """Compare attention of the tree with that of separate rows in float64, forward and backward."""
    blocks = Blocks(tree.segments, torch.device("cpu"))
    places, sources = torch.from_numpy(tree.places), torch.from_numpy(tree.sources)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, len(sources), heads, 8, generator=generator) for heads in (4, 2, 2)]
    weights = torch.randn(1, len(sources), 4, 8, generator=generator)
    tensors = [each.clone().requires_grad_() for each in given]
    found = tree_attention(*(each.transpose(1, 2) for each in tensors), blocks, 0.5)
    (found * weights).sum().backward()
    exact = [each.double().requires_grad_() for each in given]
    query, key, value = (each[0, places].transpose(1, 2) for each in exact)
    rows = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5, enable_gqa=True)
    expected = rows.transpose(1, 2).flatten(0, 1)[sources][None]
    (expected * weights).sum().backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(tensors, exact, strict=True):
        # A key's gradient is a sum over all tokens after it, with the rounding of its largest terms.
        scale = max(1.0, float(theirs.grad.abs().max()))
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5 * scale)


def strided(values: Tensor) -> Tensor:
    """The same values with a gap after each element of a head."""
    return values.repeat_interleave(2, -1)[..., ::2]


def transposed(values: Tensor) -> Tensor:
    return values.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("layout", [strided, transposed])
def test_heads_whose_elements_are_not_adjacent(layout: Callable[[Tensor], Tensor]) -> None:
    """The CPU kernel would read other memory."""
    rows = [torch.cat([each.prompt_ids, each.response_ids]) for each in groups(GROUPS)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).numpy()
    tree = PrefixTree.of(ids, [len(row) for row in rows])
    generator, found = torch.Generator().manual_seed(0), []
    given = [torch.randn(1, heads, len(tree.sources), 8, generator=generator) for heads in (4, 2, 2)]
    for change in (torch.clone, layout):
        tensors = [change(each).requires_grad_() for each in given]
        output = tree_attention(*tensors, Blocks(tree.segments, torch.device("cpu")), None)
        found.append([output.detach(), *torch.autograd.grad(output.square().sum(), tensors)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_tree_as_deep_as_its_number_of_rows() -> None:
    """Such as answers that repeat one token, each a different number of times."""
    lengths = list(range(20, 1520))
    ids = np.array([[1] * length + [2] * (max(lengths) - length) for length in lengths])
    tree = PrefixTree.of(ids, lengths, min_saved=1)
    assert len(tree.sources) == max(lengths)


@pytest.mark.parametrize(
    ("capability", "head_size", "expected"), [((8, 0), 64, True), ((7, 5), 64, False), ((9, 0), 20, False)]
)
def test_gpus_without_the_kernel_attend_over_rows(
    capability: tuple[int, int], head_size: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert VarlenBlock.supports(torch.zeros(1, 1, 1, head_size, dtype=torch.bfloat16)) is expected


def test_bfloat16_is_as_exact_as_separate_rows() -> None:
    model, experience = build(), collate(groups(GROUPS))
    exact = run(model, experience, packed=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = shared(experience, model), run(model, experience, packed=False)
    for one, other, true in zip(ours, theirs, exact, strict=True):
        assert (one - true).norm() <= 1.5 * (other - true).norm() + 1e-3


def test_values_of_a_critic() -> None:
    critic, experience = Critic.from_pretrained(build()), collate(groups(GROUPS))
    torch.manual_seed(1)
    nn.init.normal_(critic.value_head.weight)
    results: list[list[Tensor]] = []
    for passes in (packed_passes(), packed_passes(critic)):
        critic.zero_grad()
        with passes:
            values = value_forward(critic, experience)
            (values * torch.linspace(-1, 2, values.numel()).view_as(values)).sum().backward()
        results.append([values.detach(), *(each.grad.clone() for each in critic.parameters() if each.grad is not None)])
    assert_same(*results)


def test_an_adapter_and_gradient_checkpointing() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    experience = collate(groups(GROUPS))
    padded = run(model, experience, packed=False)
    assert_same(run(model, experience, packed=True), padded)
    model.enable_input_require_grads()
    enable_gradient_checkpointing(model.train().base_model.model)
    assert_same(run(model, experience, packed=True), padded)


def test_embeddings_that_depend_on_the_length_are_not_shared() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build(rope_parameters=rope, max_position_embeddings=16)
    experience = collate(groups(GROUPS))
    with packed_passes(model):
        assert type(model_rows(model, experience)) is PackedRows
    units = [[each] for each in groups(GROUPS)]
    assert plan(units, 40, model) == plan(units, 40, model, ForwardPasses)


def test_rows_without_a_common_beginning_are_packed_as_before() -> None:
    model, experience = build(), collate(groups([(20, (5,)), (9, (4,)), (3, (2, 2))]))
    with packed_passes(model):
        assert type(model_rows(model, experience)) is PackedRows


def test_a_batch_in_which_nothing_counts() -> None:
    experience = collate(groups(GROUPS))
    experience = replace(experience, action_mask=torch.zeros_like(experience.action_mask))
    gradients = shared(experience, build())[2:]
    assert all((each == 0).all() for each in gradients)


@given(LENGTHS, st.integers(1, 200), st.integers(0, 100))
@settings(deadline=None)
def test_a_plan_has_each_unit_once_within_the_bound(lengths: Lengths, max_tokens: int, more: int) -> None:
    units = [[each] for each in groups(lengths)]
    planned = shared_plan(units, max_tokens, max_tokens + more)
    if planned is None:
        return
    assert sorted(chain.from_iterable(planned)) == list(range(len(units)))
    for indices in planned:
        rows = [torch.cat([units[i][0].prompt_ids, units[i][0].response_ids]) for i in indices]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).numpy()
        num_tokens = len(PrefixTree.of(ids, [len(row) for row in rows]).sources)
        same = len({units[i][0].group_id for i in indices}) == 1
        assert len(rows) == 1 or num_tokens <= max_tokens + same * more


def test_answers_to_a_prompt_share_a_pass() -> None:
    units = [[each] for each in groups([(50, (10, 30, 20)), (40, (12, 31, 22))])]
    model = build()
    assert plan(units, 120, model) == [[0, 1, 2], [3, 4, 5]]
    assert plan(units, None, model) == [[0, 1, 2, 3, 4, 5]]
    gpt2 = build("gpt2")
    assert plan(units, 120, gpt2) == plan(units, 120, gpt2, ForwardPasses)
    split = plan(units, 90, model)
    assert all(len({units[index][0].group_id for index in part}) == 1 for part in split) and len(split) == 4


def test_units_stay_whole() -> None:
    rows = groups([(50, (10, 30, 20, 15))])
    assert plan([rows[:3], rows[3:]], 90, build()) == [[0], [1]]


def test_a_large_model_on_a_cpu_shares_at_its_default_bound() -> None:
    units, model = [[each] for each in groups([(180, (12, 31, 22)), (180, (50, 50, 50))])], build()
    default = default_micro_batch_tokens("cpu", 100_000_000)
    with mock.patch.object(fast_passes, "default_micro_batch_tokens", return_value=default):
        assert plan(units, None, model) == [[3, 4, 5], [0, 1, 2]]
        assert len(plan(units, default, model)) == 6  # the maximum of a run file holds


def test_a_layout_with_as_many_tokens_as_actions_is_not_used() -> None:
    prompt, answer = tokens(16, 0), tokens(2, 1)
    rows = [item(index, prompt, answer) for index in range(9)]
    experience = collate(rows)
    with packed_passes(build()):
        assert int(experience.action_mask.sum()) == 18
    model = build()
    with packed_passes(model):
        assert not isinstance(model_rows(model, experience), SharedRows)
    assert_same(run(model, experience, packed=True), run(model, experience, packed=False))


@pytest.mark.gpu
@pytest.mark.parametrize("made", [lambda: groups(GROUPS), branches], ids=["answers", "branches"])
def test_attention_on_a_gpu(made: Any) -> None:
    """In bfloat16, as close to float64 as torch's own attention with a mask."""
    rows = [torch.cat([each.prompt_ids, each.response_ids]) for each in made()]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).numpy()
    tree, device = PrefixTree.of(ids, [len(row) for row in rows]), torch.device("cuda")
    size, generator = len(tree.sources), torch.Generator(device).manual_seed(0)
    mask = torch.zeros(size, size, dtype=torch.bool, device=device)
    for each in tree.segments:
        mask[each.start : each.end, each.start : each.stop] = True
    mask = mask.tril()
    given = [torch.randn(1, heads, size, 64, generator=generator, device=device).bfloat16() for heads in (4, 2, 2)]
    weights = torch.randn(1, size, 4, 64, generator=generator, device=device)
    found: list[list[Tensor]] = []
    for dtype, blocks in (
        (torch.bfloat16, Blocks(tree.segments, device)),
        (torch.bfloat16, None),
        (torch.float64, None),
    ):
        query, key, value = tensors = [each.to(dtype).requires_grad_() for each in given]
        if blocks is not None:
            output = tree_attention(query, key, value, blocks, None)
        else:
            key, value = (each.repeat_interleave(2, 1) for each in (key, value))
            attention = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            output = attention.transpose(1, 2)
        found.append([output.detach(), *torch.autograd.grad((output * weights).sum(), tensors)])
    for ours, theirs, exact in zip(*found, strict=True):
        assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm() + 1e-3 * exact.norm()
