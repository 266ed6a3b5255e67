"""Gradients that embedding and head add themselves are those of torch, without a matrix of their size in each pass."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_passes import lean_head
from rlhf_passes import vocabulary_gradients as module
from rlhf_passes.fast_passes import fast_passes
from rlhf_passes.vocabulary_gradients import adds_directly, direct_gradients

VOCABULARY, HIDDEN = 60, 16
IDS = torch.tensor([[5, 3, 5, 0, 9, 5, 1, 59], [2, 2, 7, 0, 0, 8, 58, 3]])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's gradient comes in several blocks, of which the last is smaller."""
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 7 * HIDDEN)


def build(*, tied: bool = True, padding: int | None = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=padding,
    )
    return LlamaForCausalLM(config)


def run(model: LlamaForCausalLM, *, direct: bool, passes: int = 2) -> list[Tensor]:
    """All gradients of several passes, of which no two tokens weigh the same."""
    model.zero_grad()
    for number in range(passes):
        with fast_passes(model), direct_gradients(model) if direct else nullcontext():
            logits = model(input_ids=IDS.roll(number, 1)).logits.log_softmax(-1)
            (logits * torch.linspace(-1, 2, logits.numel()).view_as(logits)).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_torch(tied: bool, padding: int | None) -> None:
    model = build(tied=tied, padding=padding)
    expected, found = run(model, direct=False), run(model, direct=True)
    assert len(found) == len(expected) == sum(1 for _ in model.parameters())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_lean_head_adds_its_gradient_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_passes.lean_head.MIN_LOGITS", 0)
    model = build()
    labels = torch.arange(16) * 3

    def gradients(*, direct: bool) -> list[Tensor]:
        model.zero_grad()
        for _ in range(2):
            context = direct_gradients(model) if direct else nullcontext()
            with context, lean_head.lean_head(model, lambda h: h.flatten(0, 1), labels, 0.7, with_entropy=True):
                pairs = model(input_ids=IDS).logits
            (pairs * torch.linspace(-1, 2, pairs.numel()).view_as(pairs)).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    for ours, theirs in zip(gradients(direct=True), gradients(direct=False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


class LargeTensors(TorchDispatchMode):
    """Counts the new tensors of the vocabulary's size."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        result = func(*args, **(kwargs or {}))
        is_large = isinstance(result, Tensor) and result.numel() >= VOCABULARY * HIDDEN
        if is_large and result.untyped_storage().data_ptr() not in given:
            self.made.append(str(func))
        return result


@pytest.mark.parametrize("tied", [True, False])
def test_a_later_pass_makes_no_matrix_of_the_vocabularys_size(tied: bool) -> None:
    model = build(tied=tied)
    run(model, direct=True, passes=1)
    kept = model.get_input_embeddings().weight.grad
    with direct_gradients(model):
        logits = model(input_ids=IDS).logits
        with LargeTensors() as seen:
            logits.sum().backward()
    logits_size = VOCABULARY * IDS.numel()
    assert logits_size == VOCABULARY * HIDDEN  # the gradient of the logits themselves
    assert len(seen.made) <= 1, seen.made
    assert model.get_input_embeddings().weight.grad is kept


def test_weights_that_others_watch_are_left_alone() -> None:
    model, seen = build(), []
    model.get_input_embeddings().weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    with direct_gradients(model):
        assert not adds_directly(model.lm_head) and "forward" not in vars(model.get_input_embeddings())
    run(model, direct=True, passes=1)
    assert seen == [(VOCABULARY, HIDDEN)]


def test_what_is_frozen_or_of_another_type_is_left_alone() -> None:
    frozen, narrow = build().requires_grad_(False), build().to(torch.bfloat16)
    special = nn.Embedding(VOCABULARY, HIDDEN, max_norm=1.0)
    limited = build(tied=False)
    limited.set_input_embeddings(special)
    for model in (frozen, narrow, limited):
        with direct_gradients(model):
            assert "forward" not in vars(model.get_input_embeddings())
    with direct_gradients(limited):
        assert adds_directly(limited.lm_head)


def test_autocast_is_as_without() -> None:
    model = build()

    def gradients(*, direct: bool) -> list[Tensor]:
        model.zero_grad()
        context = direct_gradients(model) if direct else nullcontext()
        with context, torch.autocast("cpu", dtype=torch.bfloat16):
            model(input_ids=IDS).logits.float().square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    for ours, theirs in zip(gradients(direct=True), gradients(direct=False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_forwards_are_as_before_afterwards() -> None:
    model = build()
    with fast_passes(model):
        fast = vars(model.lm_head).get("forward")
        with pytest.raises(ZeroDivisionError), direct_gradients(model):
            assert adds_directly(model.lm_head)
            raise ZeroDivisionError
        assert vars(model.lm_head).get("forward") is fast
    assert "forward" not in vars(model.lm_head) and "forward" not in vars(model.get_input_embeddings())


def test_without_gradients_nothing_is_added() -> None:
    model = build()
    with torch.no_grad(), direct_gradients(model):
        found = model(input_ids=IDS).logits
    assert torch.equal(found, model(input_ids=IDS).logits) and model.lm_head.weight.grad is None
