"""The head that never holds all logits gives the plain path's numbers and gradients."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.batching import collate
from rlhf_core.models.forward_passes import applying
from rlhf_core.types import BufferItem, Experience
from rlhf_forward.forward import policy_forward
from rlhf_passes import lean_head as module
from rlhf_passes.fast_passes import FastPasses


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def _experience() -> Experience:
    generator = torch.Generator().manual_seed(1)

    def item(index: int, prompt: int, answer: int) -> BufferItem:
        mask = torch.ones(answer, dtype=torch.bool)
        mask[0] = index != 2
        return BufferItem(
            sample_id=index,
            group_id=index,
            policy_version=0,
            prompt_ids=torch.randint(0, 211, (prompt,), generator=generator),
            response_ids=torch.randint(0, 211, (answer,), generator=generator),
            action_mask=mask,
            action_log_probs=torch.zeros(answer),
        )

    return collate([item(0, 5, 7), item(1, 3, 4), item(2, 6, 9)])


def _run(model: LlamaForCausalLM, with_entropy: bool, entropy_grad: bool = True) -> list[torch.Tensor]:
    batch = _experience()
    model.zero_grad()
    with applying(FastPasses(), nullcontext()):
        output = policy_forward(model, batch, 0.7, with_entropy=with_entropy, entropy_grad=entropy_grad)
    weights = torch.linspace(-1, 2, batch.action_mask.numel()).view_as(batch.action_mask)
    loss = (output.log_probs * weights).sum()
    if output.entropy is not None and entropy_grad:
        loss = loss - 0.3 * (output.entropy * weights.flip(0)).sum()
    loss.backward()
    found = [output.log_probs, *([] if output.entropy is None else [output.entropy])]
    return [*(tensor.detach() for tensor in found), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize(("with_entropy", "entropy_grad"), [(False, True), (True, True), (True, False)])
def test_numbers_and_gradients_are_those_of_the_plain_path(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, with_entropy: bool, entropy_grad: bool
) -> None:
    plain = _run(model, with_entropy, entropy_grad)
    monkeypatch.setattr(module, "MIN_LOGITS", 0)
    monkeypatch.setattr(module, "CHUNK_LOGITS", 211 * 3)
    lean = _run(model, with_entropy, entropy_grad)
    assert len(lean) == len(plain)
    for ours, theirs in zip(lean, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_head_is_itself_again_afterwards(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_LOGITS", 0)
    _run(model, True)
    assert "forward" not in vars(model.lm_head)
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 211)


def test_models_that_change_their_logits_take_the_plain_path(model: LlamaForCausalLM) -> None:
    assert module.can_be_lean(model, 1 << 24)
    model.config.model_type = "gemma2"
    assert not module.can_be_lean(model, 1 << 24)


def test_small_outputs_take_the_plain_path(model: LlamaForCausalLM) -> None:
    assert not module.can_be_lean(model, 100)
