"""New weights, packed copies, and a module that the trainer gets back as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rlhf_core.errors import SyncError
from rlhf_core.protocols import RolloutEngine
from rlhf_core.rollout import replace_weights
from rlhf_core.types import SamplingParams
from rlhf_hf.prepack import PackedLinears

SAMPLING = SamplingParams(max_new_tokens=16)


def new_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in module.state_dict().items()
    }


def test_it_is_a_rollout_engine(model, engine):
    made = engine(model("llama"))
    assert isinstance(made, RolloutEngine)
    assert made.policy_version == 0


def test_received_weights_change_the_answers(packs, model, engine, requests, collect):
    module, asked = model("llama").requires_grad_(False), requests(8)
    made = engine(module)
    before = collect(made, asked, SAMPLING)
    weights = new_weights(module)
    replace_weights(module, weights, 1)
    made.weights_updated(1)
    after = collect(made, asked, SAMPLING)
    assert made.policy_version == 1
    assert {answer.policy_version for answer in after.values()} == {1}
    twin = model("llama")
    twin.load_state_dict(weights)
    fresh = collect(engine(twin), asked, SAMPLING)
    assert {key: answer.token_ids for key, answer in after.items()} == {
        key: answer.token_ids for key, answer in fresh.items()
    }
    assert {key: a.token_ids for key, a in after.items()} != {key: a.token_ids for key, a in before.items()}


def test_shared_weights_changed_in_place_count_after_the_update(packs, model, engine, requests, collect):
    module, asked = model("llama"), requests(8)
    made = engine(module)
    before = collect(made, asked, SAMPLING)
    module.load_state_dict(new_weights(module))
    made.weights_updated(3)
    after = collect(made, asked, SAMPLING)
    assert {answer.policy_version for answer in after.values()} == {3}
    assert {key: a.token_ids for key, a in after.items()} != {key: a.token_ids for key, a in before.items()}


def test_weights_that_arrive_in_the_middle_are_refused(model, engine, requests):
    made = engine(model("llama"), max_batch_size=2)
    answers = made.generate(requests(8), SAMPLING)
    next(answers)
    made.weights_updated(1)
    with pytest.raises(SyncError, match="version 0 was generating"):
        list(answers)


def test_the_caller_sees_the_module_as_it_left_it(packs, model, engine, requests):
    """Between two completions too: flags, gradients and forwards are the trainer's."""
    module = model("llama")
    module.model.layers[0].eval()
    flags = {name: part.training for name, part in module.named_modules()}
    weights = copy.deepcopy(module.state_dict())
    answers = engine(module, max_batch_size=3).generate(requests(9), SAMPLING)
    for _ in answers:
        assert {name: part.training for name, part in module.named_modules()} == flags
        assert not any("forward" in vars(part) for part in module.modules())
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    module(torch.tensor([[4, 5, 6]])).logits.sum().backward()
    assert module.lm_head.weight.grad is not None
    assert all(torch.equal(tensor, weights[name]) for name, tensor in module.state_dict().items())


def test_flags_come_back_after_an_error(model, engine, requests):
    module = model("llama")
    made = engine(module)
    assert made.path.name == "slots"
    module.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(Exception, match="finite"):
        list(made.generate(requests(2), SAMPLING))
    assert all(part.training for part in module.modules())
    assert not any("forward" in vars(part) for part in module.modules())


def test_packed_linears_compute_the_same(model, monkeypatch):
    monkeypatch.setattr("rlhf_hf.prepack.MIN_MULTIPLICATIONS", 0)
    module = model("llama").eval()
    ids = torch.arange(4, 40).view(4, 9)
    with torch.no_grad():
        plain = module(ids).logits
        packed = PackedLinears(module, num_rows=64)
        with packed.applied():
            assert torch.allclose(module(ids).logits, plain, atol=1e-5)
        assert torch.equal(module(ids).logits, plain)
    assert len(packed) == 15


def test_small_linears_stay_unpacked(model, monkeypatch):
    assert len(PackedLinears(model("llama"), num_rows=64)) == 0
    assert len(PackedLinears(nn.Linear(512, 512), num_rows=16)) == 1
    monkeypatch.setattr("rlhf_hf.prepack.MIN_MULTIPLICATIONS", 0)
    assert len(PackedLinears(nn.Linear(512, 512).double(), num_rows=8)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_with_a_bias_in_both_dtypes(dtype, monkeypatch):
    monkeypatch.setattr("rlhf_hf.prepack.MIN_MULTIPLICATIONS", 0)
    linear = nn.Linear(96, 200).to(dtype)
    inputs = torch.randn(40, 1, 96).to(dtype)
    packed = PackedLinears(linear, num_rows=40)
    with torch.no_grad():
        plain = linear(inputs)
        with packed.applied():
            assert torch.allclose(linear(inputs), plain, atol=1e-5 if dtype is torch.float32 else 2e-2)


def test_a_head_is_not_copied_where_onednn_multiplies_by_it_as_it_is(monkeypatch):
    torch.manual_seed(0)
    head, block = nn.Linear(64, 4096, bias=False), nn.Linear(64, 128)
    for place in ("rlhf_hf.prepack", "rlhf_passes.fast_linear"):
        monkeypatch.setattr(f"{place}.MIN_MULTIPLICATIONS", 0)
    copied = []
    reorder = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(
        torch.ops.mkldnn,
        "_reorder_linear_weight",
        lambda weight, rows: copied.append(weight.shape) or reorder(weight, rows),
    )
    inputs = torch.randn(5, 1, 64)
    with torch.no_grad():
        for faster, copies in ((True, [(128, 64)]), (False, [(4096, 64), (128, 64)])):
            for place in ("rlhf_hf.prepack", "rlhf_passes.fast_linear"):
                monkeypatch.setattr(f"{place}.uses_onednn", lambda faster=faster: faster)
            copied.clear()
            packed = PackedLinears(nn.Sequential(head, block), num_rows=64)
            assert copied == copies
            plain = head(inputs)
            with packed.applied():
                logits = head(inputs)
                assert all(
                    torch.equal(head(row[None]), expected[None]) for row, expected in zip(inputs, logits, strict=True)
                )
            torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5)
