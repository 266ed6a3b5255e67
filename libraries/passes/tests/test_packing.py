"""Samples in one row without padding give the numbers and gradients of padded rows, model by model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_passes import LAYERS, VOCABULARY, assert_same, build, packed_passes, run
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from rlhf_core.batching import collate
from rlhf_core.types import BufferItem, Experience
from rlhf_forward.architectures import with_trait
from rlhf_forward.forward import model_rows
from rlhf_forward.logits import causal_lm_logits
from rlhf_forward.rows import PaddedRows
from rlhf_models.gradient_checkpointing import enable_gradient_checkpointing
from rlhf_passes import lean_head
from rlhf_passes.packing import PackedRows, Packing


def batch(lengths: list[tuple[int, int]], *, support: bool = False) -> Experience:
    generator = torch.Generator().manual_seed(1)

    def item(index: int, prompt: int, answer: int) -> BufferItem:
        acts = torch.ones(answer, dtype=torch.bool)
        acts[0] = index != 1
        answers = torch.randint(1, VOCABULARY, (answer,), generator=generator)
        kept = torch.stack([answers, (answers + 3) % VOCABULARY], dim=1).int() if support else None
        return BufferItem(
            sample_id=index,
            group_id=index,
            policy_version=0,
            prompt_ids=torch.randint(1, VOCABULARY, (prompt,), generator=generator),
            response_ids=answers,
            action_mask=acts,
            action_log_probs=torch.zeros(answer),
            support_ids=kept,
        )

    return collate([item(index, *each) for index, each in enumerate(lengths)])


RAGGED = [(5, 7), (2, 3), (9, 2), (1, 11)]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what attention laid out as rows: three a layer and pass, none where nothing was packed."""
    shapes: list[tuple[int, ...]] = []
    as_rows = Packing.as_rows

    def noted(self: Packing, packed: Tensor) -> Tensor:
        rows = as_rows(self, packed)
        shapes.append(tuple(rows.shape))
        return rows

    monkeypatch.setattr(Packing, "as_rows", noted)
    return shapes


@pytest.mark.parametrize("model_type", sorted(with_trait("packs")))
def test_packed_rows_give_what_padded_rows_give(model_type: str, moved: list) -> None:
    model, experience = build(model_type), batch(RAGGED)
    padded = run(model, experience, packed=False)
    assert not moved
    assert_same(run(model, experience, packed=True), padded)
    assert moved[:3] == [(4, 4, 12, 4), (4, 2, 12, 4), (4, 2, 12, 4)] and len(moved) == 3 * LAYERS


@pytest.mark.parametrize("window", [1, 3, 11, 12])
def test_a_sliding_window_stays_one(window: int, moved: list) -> None:
    model, experience = build("mistral", sliding_window=window), batch(RAGGED)
    padded = run(model, experience, packed=False)
    assert_same(run(model, experience, packed=True), padded)
    assert moved
    if window < 11:  # the last token is predicted from 11
        whole = run(build("mistral", sliding_window=None), experience, packed=False)
        assert not torch.allclose(whole[0], padded[0], atol=1e-5)


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=5), st.integers(1, 3))
def test_packing_is_undone_forward_and_backward(lengths: list[tuple[int, int]], heads: int) -> None:
    is_token = batch(lengths).attention_mask
    packing = Packing.of(is_token)
    tokens = [prompt + answer for prompt, answer in lengths]
    packed = torch.arange(1.0, 1 + sum(tokens) * heads).view(1, heads, -1, 1).requires_grad_()
    rows = packing.as_rows(packed)
    assert rows.shape == (len(lengths), heads, max(tokens), 1)
    start = 0
    for row, count in enumerate(tokens):
        assert torch.equal(rows[row, :, :count], packed[0, :, start : start + count])
        start += count
    back = packing.as_packed(rows.transpose(1, 2))
    assert torch.equal(back, packed.transpose(1, 2))
    weights = torch.randn(back.shape)
    (back * weights).sum().backward()
    assert torch.equal(packed.grad, weights.transpose(1, 2))


@pytest.mark.parametrize("lengths", [[(1, 1)], [(3, 4)] * 3, [(1, 9), (9, 1)]])
def test_rows_of_any_lengths(lengths: list[tuple[int, int]]) -> None:
    model, experience = build(), batch(lengths)
    assert_same(run(model, experience, packed=True), run(model, experience, packed=False))


def test_gradient_checkpointing_repeats_it(moved: list) -> None:
    model, experience = build(), batch(RAGGED)
    padded = run(model, experience, packed=False)
    enable_gradient_checkpointing(model.train())
    assert_same(run(model, experience, packed=True), padded)
    assert len(moved) == 2 * 3 * LAYERS


def test_an_adapter_and_wrappers_are_seen_through(moved: list) -> None:
    from peft import LoraConfig, get_peft_model

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **options: Any) -> Any:
            return self.module(*args, **options)

    adapted = get_peft_model(build(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    wrapped, experience = Wrapper(adapted), batch(RAGGED)
    padded = run(wrapped, experience, packed=False)
    assert_same(run(wrapped, experience, packed=True), padded)
    assert moved


def test_the_head_in_chunks_and_truncated_sampling(moved: list, monkeypatch: pytest.MonkeyPatch) -> None:
    model, experience = build(), batch(RAGGED)
    padded = run(model, experience, packed=False)
    monkeypatch.setattr(lean_head, "MIN_LOGITS", 0)
    monkeypatch.setattr(lean_head, "CHUNK_LOGITS", VOCABULARY * 3)
    assert_same(run(model, experience, packed=True), padded)
    supported = batch(RAGGED, support=True)
    assert_same(run(model, supported, packed=True), run(model, supported, packed=False))


def test_a_fully_masked_batch_still_runs_backward() -> None:
    model, experience = build(), batch(RAGGED)
    experience = replace(experience, action_mask=torch.zeros_like(experience.action_mask))
    gradients = run(model, experience, packed=True)[2:]
    assert len(gradients) == len(list(model.parameters())) and all((each == 0).all() for each in gradients)


@torch.no_grad()
def test_rows_that_are_not_packed_are_what_they_were() -> None:
    model, experience = build("mistral", sliding_window=3), batch(RAGGED)
    rows = PaddedRows.of(experience)
    outside = causal_lm_logits(model, rows.sequences, rows.attention_mask)
    with packed_passes(model):
        inside = causal_lm_logits(model, rows.sequences, rows.attention_mask)
    assert torch.equal(inside, outside)


@pytest.mark.parametrize(
    "changed",
    [{"model_type": "gpt2"}, {"attn_implementation": "eager"}, {"model_type": "mixtral", "output_router_logits": True}],
)
def test_other_models_are_given_padded_rows(changed: dict[str, str], moved: list) -> None:
    model, experience = build(**changed), batch(RAGGED)
    padded = run(model, experience, packed=False)
    assert_same(run(model, experience, packed=True), padded)
    assert not moved


def test_code_that_does_not_know_of_packing_is_not_given_packed_rows_or_fails() -> None:
    class Foreign(LlamaForCausalLM):
        """As it may come with a hub model: a llama by its config."""

        def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> object:
            return super().forward(input_ids, attention_mask, position_ids)

    model, experience = build(), batch(RAGGED)
    foreign = Foreign(model.config)
    with packed_passes(model, foreign):
        assert isinstance(model_rows(foreign, experience), PaddedRows)
        inputs = dict(PackedRows(PaddedRows.of(experience)).inputs)
        del inputs["packing"]
        with pytest.raises(RuntimeError, match="size"):
            model(**inputs)


def test_the_model_is_itself_again_afterwards() -> None:
    model, experience = build(), batch(RAGGED)
    with pytest.raises(ZeroDivisionError), packed_passes(model):
        assert isinstance(model_rows(model, experience), PackedRows)
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"
    assert isinstance(model_rows(model, experience), PaddedRows)
