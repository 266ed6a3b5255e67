"""Adapters: variants and initializations equal their formulas, and merged and saved weights equal the trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config import ModelConfig
from rlhf_core.errors import UserInputError
from rlhf_models import load_policy, load_tokenizer, merged_weights, save_adapter
from rlhf_models.causal_lm import CausalLM

PATH = "builtin:tiny-digits"
IDS = torch.tensor([[3, 4, 5, 6, 7]])
VARIANTS: list[dict[str, Any]] = [
    {"rslora": True},
    {"dora": True},
    {"dora": True, "rslora": True, "init": "gaussian"},
    {"init": "gaussian"},
    {"init": "orthogonal"},
    {"init": "olora"},
    {"init": "pissa"},
    {"init": "pissa", "rslora": True},
    {"init": "pissa_niter_16"},
]


def load(**options: Any) -> Any:
    config = ModelConfig.model_validate({"path": PATH, **options})
    return load_policy(config, dtype=torch.float32, seed=5)


def trained(**options: Any) -> Any:
    """A model whose trained weights were moved, as by an update."""
    model = load(**options)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def plain(weights: dict[str, torch.Tensor]) -> Any:
    model = load()
    model.load_state_dict(weights, strict=False)
    return model


@pytest.mark.parametrize("lora", VARIANTS, ids=str)
def test_a_new_adapter_does_not_change_the_model_and_its_reference_stays(lora: dict[str, Any]) -> None:
    before = logits(load())
    torch.testing.assert_close(logits(load(lora={"r": 4, **lora})), before, rtol=1e-4, atol=1e-5)
    model = trained(lora={"r": 4, **lora})
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    after = logits(model)
    assert (after - before).abs().max() > 1e-2
    off = CausalLM(None, ModelConfig(path=PATH)).adapter_off(model)
    assert off is not None
    with off():
        torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(model), after)
    assert names == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(".default" in name for name in names)


@pytest.mark.parametrize("lora", VARIANTS, ids=str)
def test_merged_and_saved_adapters_equal_the_trained_model(lora: dict[str, Any], tmp_path: Path) -> None:
    from peft import PeftModel

    model = trained(lora={"r": 4, **lora})
    state = dict(model.state_dict())
    start = {name: tensor.clone() for name, tensor in state.items()}
    expected = logits(model)
    torch.testing.assert_close(logits(plain(merged_weights(model, state))), expected, rtol=1e-4, atol=1e-5)
    save_adapter(model, state, tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())


def test_the_merged_weight_of_dora_is_its_formula_in_float64() -> None:
    model = trained(lora={"r": 4, "alpha": 6.0, "rslora": True, "dora": True})
    name = "model.layers.0.mlp.up_proj"
    layer = model.get_base_model().get_submodule(name)
    base, down, up = (
        each.weight.detach().double() for each in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"])
    )
    magnitude = layer.lora_magnitude_vector["default"].weight.detach().double()
    direction = base + 6.0 / 4**0.5 * up @ down
    expected = magnitude[:, None] * direction / direction.norm(dim=1, keepdim=True)
    found = merged_weights(model, dict(model.state_dict()))[f"{name}.weight"]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_pissa_starts_at_the_largest_singular_values() -> None:
    base, layer = (
        load(**options).get_submodule(prefix + "model.layers.0.mlp.up_proj")
        for options, prefix in (({}, ""), ({"lora": {"r": 4, "init": "pissa"}}, "base_model.model."))
    )
    left, values, right = torch.linalg.svd(base.weight.detach().double(), full_matrices=False)
    product = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    expected = left[:, :4] * values[:4] @ right[:4]
    torch.testing.assert_close(product.detach().double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("lora", [{}, {"dora": True}], ids=str)
def test_quantized_layers_equal_their_dequantized_weights(kind: str, lora: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = trained(lora={"r": 4, **lora}, quantize=kind)
    expected = logits(model.eval())
    assert torch.equal(logits(model.train()), expected)
    state = dict(model.state_dict())
    merged = merged_weights(model, state)
    assert merged.keys() == load().state_dict().keys()
    torch.testing.assert_close(logits(plain(merged)), expected, rtol=1e-4, atol=1e-4)
    off = CausalLM(None, ModelConfig(path=PATH)).adapter_off(model)
    assert off is not None
    with off():
        reference = logits(model)
    error = (reference - logits(load())).abs().max()
    assert 0 < error < (1.0 if kind == "nf4" else 0.1)
    model(input_ids=IDS).logits.square().mean().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert gradients and all("lora_" in name for name in gradients)
    kept = {name: tensor for name, tensor in model.state_dict().items() if "lora_" not in name}
    assert all(torch.equal(tensor, state[name]) for name, tensor in kept.items())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_gradients_through_quantized_layers_are_those_of_dequantized_ones(kind: str) -> None:
    pytest.importorskip("bitsandbytes")
    from rlhf_models.quantized import dequantized, quantize

    model = load()
    quantize(model, kind)
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    weight = dequantized(layer).double()
    inputs = torch.randn(3, weight.shape[1], requires_grad=True)
    output = layer(inputs)
    output.square().sum().backward()
    torch.testing.assert_close(output.double(), inputs.double() @ weight.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.grad, (2 * (inputs.double() @ weight.T) @ weight).float(), rtol=1e-4, atol=1e-4)
    kept = load().get_submodule("model.layers.0.mlp.down_proj").weight
    assert layer.weight.numel() * layer.weight.element_size() <= kept.numel()
    assert (weight - kept.double()).abs().max() <= kept.abs().max() * (0.16 if kind == "nf4" else 1 / 127)
    assert type(model.lm_head) is torch.nn.Linear
    wide = type(model.get_submodule("model.layers.0.mlp.up_proj")) is torch.nn.Linear
    assert wide == (kind == "nf4"), "its 96 inputs are one and a half blocks"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": {"init": "pissa", "dora": True}}, "pissa cannot be combined with dora"),
        ({"lora": {"init": "orthogonal", "r": 3}}, "orthogonal needs an even rank, not 3"),
        ({"lora": {"init": "olora"}, "quantize": "int8"}, "olora needs the base weights in full precision"),
        ({"quantize": "nf4"}, "nf4 weights are frozen"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        CausalLM(None, ModelConfig.model_validate({"path": PATH, **options})).check()
    with pytest.raises(UserInputError, match=message):
        load(**options)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora"])
def test_a_rank_above_that_of_a_weight_is_refused(init: str) -> None:
    with pytest.raises(UserInputError, match=f"model.lora.r: {init} takes .* has rank 96, not 97"):
        load(lora={"r": 97, "init": init})


def test_an_adapter_folder_cannot_be_quantized(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = load(lora={"r": 2})
    save_adapter(model, dict(model.state_dict()), tmp_path)
    load_tokenizer(ModelConfig(path=PATH)).save_pretrained(tmp_path)
    options = {"path": str(tmp_path), "lora": {"r": 2}, "quantize": "nf4"}
    with pytest.raises(UserInputError, match="is an adapter, which cannot be merged into nf4 weights"):
        CausalLM(None, ModelConfig.model_validate(options)).check()
