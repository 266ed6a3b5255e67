"""A forward pass over an experience: the same numbers for a sample alone, batched and wrapped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rlhf_core.batching import collate
from rlhf_core.types import BufferItem
from rlhf_forward import token_log_probs
from rlhf_forward.forward import policy_forward, value_forward
from rlhf_forward.logits import causal_lm_logits, innermost
from rlhf_forward.rows import PaddedRows

VOCABULARY = 17


def item(sample_id: int, prompt: list[int], response: list[int], support: list[list[int]] | None = None) -> BufferItem:
    return BufferItem(
        sample_id=sample_id,
        group_id=0,
        policy_version=0,
        prompt_ids=torch.tensor(prompt),
        response_ids=torch.tensor(response),
        action_mask=torch.ones(len(response), dtype=torch.bool),
        action_log_probs=torch.zeros(len(response)),
        support_ids=None if support is None else torch.tensor(support, dtype=torch.int32),
    )


ITEMS = [item(0, [1, 2, 3, 4], [5, 6]), item(1, [7], [8, 9, 10, 11]), item(2, [3, 3], [4])]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32)).eval()


class Plain(nn.Module):
    """A causal LM whose forward takes neither positions nor `logits_to_keep`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> object:
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        return self.inside(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.seen: set[str] = set()

    def forward(self, *args: object, **kwargs: object) -> object:
        self.seen = set(kwargs)
        return self.module(*args, **kwargs)


def expected(model: nn.Module, one: BufferItem, temperature: float) -> Tensor:
    """By hand, of one unpadded sample."""
    tokens = torch.cat([one.prompt_ids, one.response_ids])
    logits = model(input_ids=tokens[None]).logits[0, one.prompt_ids.numel() - 1 : -1]
    return token_log_probs(logits, one.response_ids, temperature, one.support_ids)


@pytest.mark.parametrize("make", [llama, gpt2])
@torch.no_grad()
def test_batched_equals_alone(make: object) -> None:
    assert callable(make)
    model = make()
    output = policy_forward(model, collate(ITEMS), 0.8, with_entropy=True)
    assert output.entropy is not None and output.log_probs.dtype == torch.float32
    for row, one in enumerate(ITEMS):
        length = one.num_response_tokens
        torch.testing.assert_close(output.log_probs[row, :length], expected(model, one, 0.8), rtol=1e-5, atol=1e-5)
        assert (output.log_probs[row, length:] == 0).all() and (output.entropy[row, :length] > 0).all()
    assert policy_forward(model, collate(ITEMS), 0.8).entropy is None


@given(st.data())
def test_the_model_is_given_no_column_more_than_the_longest_row_needs(data: st.DataObject) -> None:
    tokens = st.integers(1, VOCABULARY - 1)
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6))
    items = []
    for index, (prompt, response) in enumerate(lengths):
        ids = data.draw(st.lists(tokens, min_size=prompt + response, max_size=prompt + response))
        acts = data.draw(st.lists(st.booleans(), min_size=response, max_size=response))
        items.append(replace(item(index, ids[:prompt], ids[prompt:]), action_mask=torch.tensor(acts)))
    batch = collate(items)
    rows = PaddedRows.of(batch)
    assert rows.sequences.shape[1] == max(map(sum, lengths)) == rows.attention_mask.shape[1]
    for row, one in enumerate(items):
        own = rows.attention_mask[row]
        assert rows.sequences[row][own].tolist() == [*one.prompt_ids.tolist(), *one.response_ids.tolist()]
        assert rows.is_read[row].sum() == one.action_mask.sum()
        assert own.nonzero().flatten().tolist() == list(range(one.num_tokens))  # padding stands behind
    labels = rows.sequences[:, 1:][rows.is_read[:, :-1]]
    assert not rows.is_read[:, : -rows.logits_to_keep].any()
    assert torch.equal(labels, batch.sequences[:, batch.prompt_length :][batch.action_mask])


@torch.no_grad()
def test_wrappers_and_plain_models_give_the_same() -> None:
    model, batch = llama(), collate(ITEMS)
    reference = policy_forward(model, batch, 1.0).log_probs
    wrapped = Wrapper(Wrapper(model))
    assert innermost(wrapped) is model
    torch.testing.assert_close(policy_forward(wrapped, batch, 1.0).log_probs, reference)
    assert wrapped.seen == {"input_ids", "attention_mask", "position_ids", "logits_to_keep", "use_cache"}
    torch.testing.assert_close(policy_forward(Plain(model), batch, 1.0).log_probs, reference)


def test_an_adapter_is_seen_through() -> None:
    from peft import LoraConfig, get_peft_model

    model = llama()
    with torch.no_grad():
        reference = policy_forward(model, collate(ITEMS), 1.0).log_probs
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert isinstance(innermost(adapted), LlamaForCausalLM)
    with torch.no_grad():
        torch.testing.assert_close(policy_forward(Wrapper(adapted), collate(ITEMS), 1.0).log_probs, reference)


@torch.no_grad()
def test_the_support_of_truncated_sampling_is_used() -> None:
    items = [item(0, [1, 2], [5, 6], [[5, 3], [6, -1]]), ITEMS[1]]
    model = llama()
    log_probs = policy_forward(model, collate(items), 1.0).log_probs
    torch.testing.assert_close(log_probs[0, :2], expected(model, items[0], 1.0), rtol=1e-5, atol=1e-5)
    assert log_probs[0, 1].abs() < 1e-6
    torch.testing.assert_close(log_probs[1], expected(model, items[1], 1.0), rtol=1e-5, atol=1e-5)


def test_a_fully_masked_batch_still_runs_backward() -> None:
    model, batch = llama(), collate(ITEMS)
    batch = replace(batch, action_mask=torch.zeros_like(batch.action_mask))
    output = policy_forward(model, batch, 1.0, with_entropy=True)
    assert output.entropy is not None
    (output.log_probs.sum() + output.entropy.sum()).backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None and (g == 0).all() for g in gradients)


def test_values_are_read_before_their_actions() -> None:
    class TokenIsValue(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
            return input_ids + 100.0 * position_ids

    values = value_forward(TokenIsValue(), collate(ITEMS))
    assert values.tolist() == [[304.0, 405.0, 0.0, 0.0], [7.0, 108.0, 209.0, 310.0], [103.0, 0.0, 0.0, 0.0]]


def test_a_model_without_logits_is_refused() -> None:
    class Odd(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return input_ids

    with pytest.raises(TypeError, match="`logits`, got Tensor"):
        policy_forward(Odd(), collate(ITEMS), 1.0)


@pytest.mark.parametrize("pads_left", [False, True])
@torch.no_grad()
def test_logits_do_not_depend_on_the_padding(pads_left: bool) -> None:
    model, tokens = llama(), torch.tensor([[1, 2, 3]])
    pad = torch.tensor([[0, 0]])
    padded = torch.cat([pad, tokens] if pads_left else [tokens, pad], dim=1)
    mask = torch.tensor([[not pads_left] * 2 + [True] + [pads_left] * 2])
    logits = causal_lm_logits(model, padded, mask)
    torch.testing.assert_close(logits[mask], model(input_ids=tokens).logits[0], rtol=1e-5, atol=1e-5)
    assert causal_lm_logits(model, padded, mask, logits_to_keep=2).shape == (1, 2, VOCABULARY)
