"""Packed rows on a GPU: the CPU's numbers in float32, and fused attention in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_core.batching import collate, to_device
from rlhf_core.types import BufferItem, Experience
from rlhf_forward.forward import policy_forward
from rlhf_passes.fast_passes import fast_passes
from rlhf_passes.packing import takes_packed_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
VOCABULARY = 512


def build(**changed: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY, **changed)).eval()


def batch() -> Experience:
    draw = torch.Generator().manual_seed(1)
    items = [
        BufferItem(
            sample_id=index,
            group_id=index,
            policy_version=0,
            prompt_ids=torch.randint(1, VOCABULARY, (prompt,), generator=draw),
            response_ids=torch.randint(1, VOCABULARY, (answer,), generator=draw),
            action_mask=torch.ones(answer, dtype=torch.bool),
            action_log_probs=torch.zeros(answer),
        )
        for index, (prompt, answer) in enumerate([(5, 70), (20, 3), (9, 2), (1, 110)])
    ]
    return collate(items)


def passed(model: nn.Module, device: str) -> list[torch.Tensor]:
    """Log-probs, entropies and all gradients, on the CPU."""
    model.to(device).zero_grad()
    experience = to_device(batch(), torch.device(device))
    with fast_passes(model):
        assert takes_packed_rows(model)
        output = policy_forward(model, experience, 0.7, with_entropy=True)
        assert output.entropy is not None
        (output.log_probs.sum() - 0.3 * output.entropy.sum()).backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return [each.detach().cpu() for each in (output.log_probs, output.entropy, *gradients)]


@pytest.mark.parametrize("key_value_heads", [4, 2])
def test_a_pass_on_the_gpu_has_the_numbers_of_the_cpu(key_value_heads: int) -> None:
    model = build(num_key_value_heads=key_value_heads)
    expected = passed(model, "cpu")
    for one, other in zip(passed(model, "cuda"), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("key_value_heads", [4, 2])
def test_attention_of_packed_rows_is_one_kernel_without_a_mask(key_value_heads: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    model = build(num_key_value_heads=key_value_heads)
    with (
        profile(activities=[ProfilerActivity.CPU]) as seen,
        torch.autocast("cuda", torch.bfloat16),
    ):
        passed(model, "cuda")
    attentions = {event.key for event in seen.key_averages() if "scaled_dot_product" in event.key}
    # torch prefers cuDNN's kernel on a Hopper GPU. Those for masks are slower, and keep all scores in the last one.
    kernels = {f"aten::_scaled_dot_product_{kind}_attention" for kind in ("flash", "cudnn")}
    assert kernels & attentions, attentions
    assert (
        not {"aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_attention_math"} & attentions
    )
