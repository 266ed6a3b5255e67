"""Log-probs of answers, and their gradients, are the same in any layout of the rows."""

import dataclasses

import pytest
import torch

from rlhf_core.models.forward_passes import applying
from rlhf_forward import causal_lm_logits
from rlhf_objective import masked_cross_entropy
from rlhf_offline.examples import Example, answer_log_probs, collate_examples
from rlhf_passes.fast_passes import FastPasses
from rlhf_passes.packing import PackedRows
from rlhf_passes.shared_rows import SharedRows
from rlhf_testing.models import tiny_model


def pairs(prompt_tokens, vocabulary):
    """Two answers of different lengths to each of three prompts."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count):
        return torch.randint(1, vocabulary, (count,), generator=generator)

    examples = []
    for index in range(3):
        prompt = tokens(prompt_tokens + index)
        for count in (5, 9 - index):
            ids = torch.cat([prompt, tokens(count)])
            examples.append(Example(ids, torch.arange(len(ids)) >= len(prompt)))
    return collate_examples(examples)


def with_gradients(model, log_probs):
    model.zero_grad()
    found = log_probs()
    (found * torch.linspace(-1, 2, len(found))).sum().backward()
    return [found.detach(), *(each.grad.clone() for each in model.parameters())]


@pytest.mark.parametrize(("prompt_tokens", "layout"), [(3, PackedRows), (24, SharedRows)])
def test_log_probs_and_gradients_are_those_of_padded_rows(prompt_tokens, layout, monkeypatch):
    model = tiny_model(seed=0)
    batch = pairs(prompt_tokens, model.config.vocab_size)
    made, lay_out = [], FastPasses.lay_out
    monkeypatch.setattr(FastPasses, "lay_out", lambda *rows: made.append(lay_out(*rows)) or made[-1])

    def plain():
        logits = causal_lm_logits(model, batch.input_ids, batch.attention_mask)[:, :-1]
        return -masked_cross_entropy(logits, batch.targets, batch.target_mask).sum(-1)

    def fast():
        passes = FastPasses()
        with applying(passes, passes.applied(model)):
            return answer_log_probs(model, batch)

    expected = with_gradients(model, plain)
    for found in (with_gradients(model, lambda: answer_log_probs(model, batch)), with_gradients(model, fast)):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert [type(rows) for rows in made] == [layout]


def test_a_batch_in_which_nothing_counts_has_zero_log_probs_and_gradients():
    model = tiny_model(seed=0)
    batch = pairs(24, model.config.vocab_size)
    batch = dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    passes = FastPasses()
    with applying(passes, passes.applied(model)):
        assert all((each == 0).all() for each in with_gradients(model, lambda: answer_log_probs(model, batch)))
