"""A sample depends on its prompt, the weights, the sampling and its id; its log-probs are those of a plain forward."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.types import SamplingParams

SAMPLINGS = {
    "plain": SamplingParams(max_new_tokens=20),
    "temperature": SamplingParams(max_new_tokens=20, temperature=0.6),
    "truncated": SamplingParams(max_new_tokens=20, temperature=1.3, top_k=12, top_p=0.8),
}
PATHS = {"llama": "slots", "gpt2": "slots", "mistral-window": "padded", "mamba": "equal"}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("family", ["llama", "mistral-window", "mamba"])
@pytest.mark.slow_except("llama-truncated")
def test_batch_size_and_order_do_not_matter(family, sampling, model, engine, requests, collect):
    module, asked = model(family), requests(64, same=2)
    whole = collect(engine(module), asked, sampling)
    sevens = collect(engine(module, max_batch_size=7, prefill_batch_tokens=16), asked[::-1], sampling)
    alone = engine(module, max_batch_size=1)
    for request in asked:
        assert whole[request.sample_id].token_ids == sevens[request.sample_id].token_ids
    for request in asked[::9]:
        single = collect(alone, [request], sampling)[request.sample_id]
        assert single.token_ids == whole[request.sample_id].token_ids
        assert single.finish_reason == whole[request.sample_id].finish_reason
        assert single.logprobs == pytest.approx(whole[request.sample_id].logprobs, abs=1e-5)


def test_equal_prompts_get_their_own_noise(model, engine, requests, collect):
    answers = collect(engine(model("llama")), requests(8, same=8), SAMPLINGS["plain"])
    assert len({answer.token_ids for answer in answers.values()}) == 8


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("family", PATHS)
def test_log_probs_are_those_of_a_plain_forward(family, sampling, model, engine, requests, collect):
    module, asked = model(family), requests(24, same=2)
    made = engine(module, max_batch_size=9)
    answers = collect(made, asked, sampling)
    assert made.path.name == PATHS[family]
    module.eval()
    for request in asked:
        answer = answers[request.sample_id]
        with torch.no_grad():
            logits = module(torch.tensor([[*request.prompt_ids, *answer.token_ids]]), use_cache=False).logits[0]
        logits = logits[len(request.prompt_ids) - 1 : -1].double() / sampling.temperature
        if answer.support_ids is not None:
            outside = torch.ones_like(logits, dtype=torch.bool)
            for place, kept in enumerate(answer.support_ids):
                outside[place, list(kept)] = False
                assert answer.token_ids[place] in kept
                assert len(kept) <= 12
            logits = logits.masked_fill(outside, -torch.inf)
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(answer.token_ids)[:, None]).squeeze(-1)
        assert answer.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    truncates = sampling.top_k > 0
    assert all((answer.support_ids is not None) == truncates for answer in answers.values())


def test_frequencies_follow_the_distribution(model, engine, requests, collect):
    """First tokens of 4,000 samples of one prompt against the model's own distribution (chi-square)."""
    module = model("llama").eval()
    asked = requests(4000, same=4000)
    answers = collect(engine(module, max_batch_size=512), asked, SamplingParams(max_new_tokens=1))
    with torch.no_grad():
        expected = module(torch.tensor([asked[0].prompt_ids])).logits[0, -1].softmax(-1).double() * len(asked)
    counts = torch.zeros_like(expected)
    for answer in answers.values():
        counts[answer.token_ids[0]] += 1
    common = expected >= 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    degrees = int(common.sum())
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "neox", "llama-eager", "mistral-window", "mamba"])
@pytest.mark.slow_except("llama")
def test_greedy_equals_transformers_generate(family, model, engine, requests, collect):
    module, asked = model(family), requests(12)
    answers = collect(engine(module, max_batch_size=5), asked, SamplingParams(max_new_tokens=24, greedy=True))
    module.eval()
    for request in asked:
        prompt = torch.tensor([request.prompt_ids])
        whole = module.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24, pad_token_id=0
        )
        assert answers[request.sample_id].token_ids == tuple(whole[0, prompt.shape[1] :].tolist())
        assert answers[request.sample_id].support_ids is None
