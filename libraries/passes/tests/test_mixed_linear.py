"""Passes in bfloat16 on a CPU are as exact as torch's autocast, and cast each weight once for all passes of a plan."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from packed_passes import VOCABULARY, build
from torch import Tensor, nn

from rlhf_core.batching import collate
from rlhf_core.models.forward_passes import applying
from rlhf_core.place import LocalPlace
from rlhf_core.types import BufferItem
from rlhf_forward import policy_forward
from rlhf_models.gradient_checkpointing import enable_gradient_checkpointing
from rlhf_passes import direct_gradients, fast_passes
from rlhf_passes.fast_passes import MIXED_TOKENS, FastPasses, default_pass_tokens
from rlhf_passes.mixed_linear import NarrowCopies, mixed_linear, narrow_copies

PLACE = LocalPlace(torch.device("cpu"), torch.float32, torch.bfloat16)


def items(prompt: int = 24, answers: tuple[int, ...] = (9, 4, 13, 6), prompts: int = 2) -> list[BufferItem]:
    """Answers to prompts. With a prompt of few tokens, nothing is shared."""
    generator = torch.Generator().manual_seed(0)
    found: list[BufferItem] = []
    for group in range(prompts):
        prompt_ids = torch.randint(1, VOCABULARY, (prompt,), generator=generator)
        for answer in answers:
            found.append(
                BufferItem(
                    sample_id=len(found),
                    group_id=group,
                    policy_version=0,
                    prompt_ids=prompt_ids,
                    response_ids=torch.randint(1, VOCABULARY, (answer,), generator=generator),
                    action_mask=torch.ones(answer, dtype=torch.bool),
                    action_log_probs=torch.zeros(answer),
                )
            )
    return found


def run(model: nn.Module, rows: list[BufferItem], *, passes: FastPasses | None, is_mixed: bool) -> list[Tensor]:
    """Log-probs, entropies and gradients."""
    model.zero_grad()
    applied = nullcontext() if passes is None else applying(passes, passes.applied(model))
    with applied:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            output = policy_forward(model, collate(rows), 0.7, with_entropy=True)
        assert output.entropy is not None
        weights = torch.linspace(-1, 2, output.log_probs.numel()).view_as(output.log_probs)
        (output.log_probs * weights - 0.3 * output.entropy * weights.flip(0)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert all(each.dtype is torch.float32 for each in gradients)
    return [output.log_probs.detach(), output.entropy.detach(), *gradients]


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """Mean relative error of the tensors that are not zero."""
    pairs = [(one, other) for one, other in zip(found, exact, strict=True) if other.norm() > 1e-6]
    return sum(float((one - other).norm() / other.norm()) for one, other in pairs) / len(pairs)


def check(model: nn.Module, rows: list[BufferItem]) -> None:
    exact = run(model, rows, passes=None, is_mixed=False)
    plain = error(run(model, rows, passes=None, is_mixed=True), exact)
    ours = error(run(model, rows, passes=FastPasses(), is_mixed=True), exact)
    assert plain > 1e-4, "plain torch rounds"
    assert ours <= 1.1 * plain


@pytest.mark.parametrize("lean", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("prompt", [24, 3], ids=["shared", "separate"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma2", "gpt2"])
def test_errors_are_those_of_plain_torch(model_type: str, prompt: int, lean: bool) -> None:
    model, rows = build(model_type), items(prompt)
    with (
        mock.patch.object(fast_passes, "saves_memory", return_value=lean),
        mock.patch("rlhf_passes.lean_head.MIN_MIXED_LOGITS", 1 if lean else 1 << 20),
        direct_gradients(model) if lean else nullcontext(),
    ):
        check(model, rows)


def test_an_adapter_and_gradient_checkpointing() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model: Any = get_peft_model(build(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    check(model, items())
    model.enable_input_require_grads()
    enable_gradient_checkpointing(model.train().base_model.model)
    check(model, items())


def test_a_head_with_a_bias_and_few_logits_at_a_time() -> None:
    model = build()
    model.lm_head.bias = nn.Parameter(torch.randn(VOCABULARY))
    with mock.patch("rlhf_passes.lean_head.MIN_MIXED_LOGITS", 1), mock.patch("rlhf_passes.lean_head.CHUNK_LOGITS", 100):
        check(model, items())


def casts(passes: FastPasses, model: nn.Module, rows: list[BufferItem]) -> int:
    """Number of weights that a pass casts."""
    of, copies = NarrowCopies.of, []

    def counted(self: NarrowCopies, weight: Tensor) -> Tensor:
        before = self._copies.get(weight)
        copy = of(self, weight)
        if before is None or before[0] is not copy:
            copies.append(copy)
        return copy

    with mock.patch.object(NarrowCopies, "of", counted):
        run(model, rows, passes=passes, is_mixed=True)
    return len(copies)


def test_weights_are_cast_once_for_the_passes_of_a_plan() -> None:
    model, rows, passes = build(), items(), FastPasses()
    linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
    for _ in range(2):
        assert len(passes.plan([[row] for row in rows], 60, PLACE, model)) == 2
        assert [casts(passes, model, rows[:4]), casts(passes, model, rows[4:])] == [len(linears), 0]


def test_copies_are_freed_after_the_last_pass_of_a_plan() -> None:
    model, rows, passes = build(), items(), FastPasses()
    kept: list[weakref.ref[NarrowCopies]] = []
    create = NarrowCopies.__init__

    def recorded(self: NarrowCopies) -> None:
        create(self)
        kept.append(weakref.ref(self))

    with mock.patch.object(NarrowCopies, "__init__", recorded):
        passes.plan([[row] for row in rows], 60, PLACE, model)
        run(model, rows[:4], passes=passes, is_mixed=True)
        assert [each() is not None for each in kept] == [True]
        run(model, rows[4:], passes=passes, is_mixed=True)
        gc.collect()
        assert [each() for each in kept] == [None]


def test_a_step_between_the_passes_of_a_plan_casts_again() -> None:
    """Rows of one plan, with a step after each pass. torch does not count the changes of fused AdamW."""
    model, rows, passes = build(), items(), FastPasses()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    passes.plan([[row] for row in rows], 60, PLACE, model)
    run(model, rows[:4], passes=passes, is_mixed=True)
    optimizer.step()
    found = run(model, rows[4:], passes=passes, is_mixed=True)
    fresh = run(model, rows[4:], passes=FastPasses(), is_mixed=True)
    assert all(torch.equal(one, other) for one, other in zip(found, fresh, strict=True))


def test_a_loss_may_run_the_same_weights_in_inference_mode_first() -> None:
    model, rows, passes = build(), collate(items()), FastPasses()
    layer, inputs = nn.Linear(4, 3), torch.randn(2, 4)
    with applying(passes, passes.applied(model)), torch.autocast("cpu", torch.bfloat16):
        with torch.inference_mode():
            before = policy_forward(model, rows, 1.0).log_probs
            mixed_linear(inputs, layer.weight, layer.bias)
        output = policy_forward(model, rows, 1.0)
        assert torch.allclose(output.log_probs, before, atol=0.02)
        output.log_probs.sum().backward()
        mixed_linear(inputs, layer.weight, layer.bias).sum().backward()  # type: ignore[union-attr]
    assert all(each.grad is not None for each in (*model.parameters(), *layer.parameters()))


@pytest.mark.parametrize("frozen", ["weight", "inputs"])
def test_only_what_the_backward_pass_needs_is_kept(frozen: str) -> None:
    layer, inputs = nn.Linear(4, 3), torch.randn(2, 4, requires_grad=frozen == "weight")
    layer.weight.requires_grad_(frozen == "inputs")
    kept: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with (
        narrow_copies(NarrowCopies()),
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        mixed_linear(inputs, layer.weight, layer.bias).sum().backward()  # type: ignore[union-attr]
    assert kept == [(3, 4) if frozen == "weight" else (2, 4)]
    assert [inputs.grad is None, layer.weight.grad is None] == [frozen == "inputs", frozen == "weight"]


def test_a_projection_that_returns_float32() -> None:
    """As quantized ones do. The product of a gate in float32 and one in bfloat16 is float32."""
    model = build()
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda _module, _inputs, output: output.float())
    with mock.patch.object(fast_passes, "saves_memory", return_value=True):
        check(model, items())


@pytest.mark.parametrize("is_mixed", [False, True])
def test_the_gradient_of_a_head_is_added_in_blocks(is_mixed: bool) -> None:
    model, rows = build(), items()
    expected = run(model, rows, passes=FastPasses(), is_mixed=is_mixed)
    sizes: list[int] = []
    num_bytes: list[int] = []

    def recorded(left: Tensor, right: Tensor) -> Tensor:
        product = left @ right
        sizes.append(product.numel())
        num_bytes.append(product.nbytes)
        return product

    with (
        mock.patch("rlhf_passes.lean_head.MIN_MIXED_LOGITS", 1),
        mock.patch("rlhf_passes.lean_head.MIN_LOGITS", 1),
        mock.patch("rlhf_passes.vocabulary_gradients.BLOCK_ELEMENTS", 80),
        mock.patch("rlhf_passes.vocabulary_gradients.multiply", recorded),
    ):
        found = run(model, rows, passes=FastPasses(), is_mixed=is_mixed)
    assert max(num_bytes) <= 4 * 80
    assert sum(sizes) == model.lm_head.weight.numel()
    assert error(found, expected) < (0.02 if is_mixed else 1e-5)


@pytest.mark.parametrize("plans", [True, False], ids=["plans", "passes without a plan"])
def test_changed_weights_are_cast_again(plans: bool) -> None:
    """A trainer that limits the number of samples of a pass calls no plan."""
    model, rows, passes = build(), items(), FastPasses()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)  # torch does not count its changes
    for _ in range(2):
        if plans:
            passes.plan([[row] for row in rows], None, PLACE, model)
        found = run(model, rows, passes=passes, is_mixed=True)
        fresh = run(model, rows, passes=FastPasses(), is_mixed=True)
        assert all(torch.equal(one, other) for one, other in zip(found, fresh, strict=True))
        optimizer.step()


def test_a_change_that_torch_counts_is_seen_without_a_plan() -> None:
    layer, copies = nn.Linear(4, 3), NarrowCopies()
    before = copies.of(layer.weight)
    assert copies.of(layer.weight) is before
    with torch.no_grad():
        layer.weight.mul_(2.0)
    assert torch.equal(copies.of(layer.weight), 2 * before)


def test_inputs_that_changed_are_cast_again() -> None:
    layer, inputs = nn.Linear(4, 3), torch.randn(2, 5, 4)
    with torch.no_grad(), narrow_copies(NarrowCopies()), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            found: Any = mixed_linear(inputs, layer.weight, layer.bias)
            assert torch.equal(found, layer(inputs))
            inputs.mul_(2.0)


def test_float32_and_frozen_models() -> None:
    layer, inputs = nn.Linear(4, 3).requires_grad_(False), torch.randn(2, 4)
    with narrow_copies(NarrowCopies()):
        assert mixed_linear(inputs, layer.weight, layer.bias) is None
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(mixed_linear(inputs, layer.weight, layer.bias), layer(inputs))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_fast", [True, False])
def test_passes_are_larger_if_the_processor_multiplies_bfloat16_fast(is_fast: bool) -> None:
    with mock.patch.object(fast_passes, "multiplies_bfloat16_fast", return_value=is_fast):
        large = 100_000_000
        assert default_pass_tokens("cpu", large, torch.bfloat16) == (MIXED_TOKENS if is_fast else 192)
        assert default_pass_tokens("cpu", large, None) == 192
        assert default_pass_tokens("cpu", 1000, torch.bfloat16) == 1024
