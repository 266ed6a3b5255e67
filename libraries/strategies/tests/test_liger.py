"""`strategy.liger`, with a stand-in for the package, whose kernels need a GPU."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from rlhf_core.components import StrategyContext
from rlhf_core.errors import ConfigError
from rlhf_strategies import TorchDdpConfig, TorchDdpStrategy, use_liger
from rlhf_strategies.liger import check_liger
from rlhf_testing.tiny_training import tiny_model


def fast_embeddings(*arguments, **options):
    raise AssertionError("called with tensors on a CPU")


@pytest.fixture
def patched(monkeypatch):
    """Models that the stand-in was called with, and its options."""
    calls = []
    package, top, patch = (ModuleType(f"liger_kernel{name}") for name in ("", ".transformers", ".monkey_patch"))

    def apply(model, **options):
        calls.append((model, options))
        modeling_llama.LlamaRMSNorm, modeling_llama.apply_rotary_pos_emb = torch.nn.LayerNorm, fast_embeddings

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    top._apply_liger_kernel_to_instance = apply
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    for name, module in (("", package), (".transformers", top), (".transformers.monkey_patch", patch)):
        monkeypatch.setitem(sys.modules, f"liger_kernel{name}", module)
    return calls


def test_the_models_inside_wrappers_are_patched_once(patched):
    wrapper = torch.nn.Sequential(tiny_model(), torch.nn.Linear(2, 2))
    use_liger(wrapper)
    assert [type(model) for model, _ in patched] == [LlamaForCausalLM]
    assert patched[0][1] == {"cross_entropy": False, "fused_linear_cross_entropy": False}


def test_other_models_of_the_process_keep_their_parts(patched):
    """Liger replaces names of transformers' modules, and its kernels need a GPU: a model on the CPU failed."""
    norm, ids = modeling_llama.LlamaRMSNorm, torch.ones(1, 3, dtype=torch.long)
    expected = tiny_model()(input_ids=ids).logits
    use_liger(tiny_model())
    use_liger(tiny_model())
    assert modeling_llama.LlamaRMSNorm is norm
    assert tiny_model()(input_ids=ids).logits.equal(expected)


def test_a_type_without_kernels_is_refused_by_name(patched):
    model = tiny_model()
    model.config.model_type = "strange"
    with pytest.raises(ConfigError, match=r"strategy.liger: does not support models of type strange"):
        use_liger(model)


def test_a_strategy_patches_trained_and_frozen_models(patched, monkeypatch):
    monkeypatch.setattr("rlhf_strategies.base.check_liger", lambda device: None)
    strategy = TorchDdpStrategy(TorchDdpConfig(liger=True), StrategyContext(device="cpu"))
    strategy.setup()
    try:
        model = tiny_model()
        strategy.prepare(model, strategy.make_optimizer(model.parameters(), lr=1e-3))
        strategy.prepare_inference(frozen := tiny_model())
    finally:
        strategy.teardown()
    assert [id(each) for each, _ in patched] == [id(model), id(frozen)]


def test_it_needs_a_gpu_and_the_package(monkeypatch):
    with pytest.raises(ConfigError, match=r"strategy.liger: needs a GPU"):
        TorchDdpStrategy(TorchDdpConfig(liger=True), StrategyContext(device="cpu"))
    monkeypatch.setattr("rlhf_strategies.liger.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"(?s)needs liger-kernel.*rlhf-torch\[cuda\]"):
        check_liger(torch.device("cuda"))
