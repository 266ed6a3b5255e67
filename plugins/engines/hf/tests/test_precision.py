"""Mixed precision generates in the arithmetic of the trainer's forward, over weights that stay float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_core.components import EngineContext
from rlhf_core.types import SamplingParams
from rlhf_hf.config import HfEngineConfig
from rlhf_hf.engine import build
from rlhf_hf.prepack import PackedLinears
from rlhf_testing.models import tiny_tokenizer

SAMPLING = SamplingParams(max_new_tokens=16)


@pytest.mark.parametrize("family", ["llama", "llama-eager", "gpt2", "mistral-window", "mamba"])
def test_log_probs_are_those_of_an_autocast_forward(family, packs, model, engine, requests, collect):
    module, asked = model(family), requests(10, same=2)
    answers = collect(engine(module, precision="bf16"), asked, SAMPLING)
    assert all(parameter.dtype is torch.float32 for parameter in module.parameters())
    module.eval()
    mixed_gaps, exact_gaps = [], []
    for request in asked:
        answer = answers[request.sample_id]
        ids = torch.tensor([[*request.prompt_ids, *answer.token_ids]])
        chosen = torch.tensor(answer.token_ids)[:, None]
        for gaps, mixed in ((mixed_gaps, True), (exact_gaps, False)):
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
                logits = module(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
            expected = logits.float().log_softmax(-1).gather(-1, chosen).squeeze(-1)
            gaps.append((expected - torch.tensor(answer.logprobs)).abs().max())
    # bfloat16 has 8 bits: logits of a few units differ in the second digit when sums are taken in another order.
    assert torch.stack(mixed_gaps).median() < 0.03
    assert 0 < torch.stack(exact_gaps).max() < 0.3


def _made(module: nn.Module, trainer: torch.dtype | None, **options):
    context = EngineContext(
        model=module,
        tokenizer=tiny_tokenizer("abc"),
        device=torch.device("cpu"),
        seed=11,
        compute_dtype=trainer,
    )
    return build(HfEngineConfig(**options), context)


def test_auto_is_what_the_trainer_multiplies_in(model, requests, collect):
    module, asked = model("llama"), requests(6)
    plain = collect(_made(module, None), asked, SAMPLING)
    mixed = collect(_made(module, torch.bfloat16), asked, SAMPLING)
    assert mixed == collect(_made(module, None, precision="bf16"), asked, SAMPLING)
    assert {key: a.logprobs for key, a in mixed.items()} != {key: a.logprobs for key, a in plain.items()}
    assert collect(_made(module, torch.bfloat16, precision="fp32"), asked, SAMPLING) == plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_generate(dtype, model, engine, requests, collect):
    module = model("llama").to(dtype)
    answers = collect(engine(module), requests(6), SAMPLING)
    assert all(len(answer.token_ids) == len(answer.logprobs) > 0 for answer in answers.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linears_of_another_type(dtype, packs):
    torch.manual_seed(0)
    linear = nn.Linear(96, 200)
    inputs = torch.randn(40, 1, 96)
    packed = PackedLinears(linear, num_rows=40, dtype=dtype)
    with torch.no_grad():
        expected = nn.functional.linear(inputs.to(dtype), linear.weight.to(dtype), linear.bias.to(dtype))
        with packed.applied():
            found = linear(inputs)
        assert found.dtype is dtype
        assert torch.allclose(found, expected, atol=2e-2)
        assert linear(inputs).dtype is torch.float32


def test_new_weights_count_in_mixed_precision(model, engine, requests, collect):
    module, asked = model("llama"), requests(6)
    made = engine(module, precision="bf16")
    before = collect(made, asked, SAMPLING)
    module.load_state_dict({name: tensor * 1.5 for name, tensor in module.state_dict().items()})
    made.weights_updated(1)
    after = collect(made, asked, SAMPLING)
    assert {key: a.token_ids for key, a in after.items()} != {key: a.token_ids for key, a in before.items()}
