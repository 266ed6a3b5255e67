"""A policy whose weights stay in their files until a strategy reads its part."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.config.sections import LoraConfig, ModelConfig
from rlhf_core.errors import CheckpointError, UserInputError
from rlhf_models import load_policy
from rlhf_strategies import StoredTensor, blank_tensor, stored_parameters, weights_left_in_files
from rlhf_testing.models import tiny_tokenizer


@pytest.fixture
def folder(tmp_path):
    """A folder of 16-bit weights, in several files."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=33,
        hidden_size=16,
        intermediate_size=30,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=7,
    )
    model = LlamaForCausalLM(config).bfloat16()
    model.generation_config.eos_token_id = [7, 8]
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    tiny_tokenizer("0123456789>,").save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    return tmp_path


def policies(folder, **options):
    """The same policy loaded whole, and with its weights left in the files."""
    config = ModelConfig(path=str(folder), **options)
    whole = load_policy(config, dtype=torch.float32, seed=0)
    with weights_left_in_files():
        return whole, load_policy(config, dtype=torch.float32, seed=0)


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2)])
def test_it_is_the_same_model(folder, lora):
    whole, left = policies(folder, lora=lora)
    stored = stored_parameters(left)
    names = [name for name, _ in left.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]
    assert set(stored) == {name for name in names if "lora_" not in name}
    for name, parameter in whole.named_parameters():
        own = left.get_parameter(name)
        assert (own.dtype, own.shape, own.requires_grad) == (parameter.dtype, parameter.shape, parameter.requires_grad)
        assert torch.equal(parameter, stored[name].read().float() if name in stored else own), name
    for (name, buffer), (_, own) in zip(whole.named_buffers(), left.named_buffers(), strict=True):
        assert torch.equal(buffer, own), name
    assert left.generation_config.eos_token_id == [7, 8]
    assert left.config.to_dict() == whole.config.to_dict()


def test_shared_weights_stay_shared_and_a_copy_has_the_same_values(folder):
    _, left = policies(folder)
    twin = copy.deepcopy(left)
    for model in (left, twin):
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert stored_parameters(twin) == stored_parameters(left)


def test_values_are_read_into_a_parameter(folder):
    _, left = policies(folder)
    stored = stored_parameters(left)["model.layers.1.mlp.up_proj.weight"]
    parameter = torch.nn.Parameter(torch.zeros(stored.read().shape))
    stored.read_into(parameter)
    assert torch.equal(parameter, stored.read().float()) and parameter.any()
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        StoredTensor(folder / "gone.safetensors", "x").read()


def test_a_folder_that_lacks_weights_is_refused_as_ever(folder):
    for file in folder.glob("model-*.safetensors"):
        tensors = load_file(file)
        tensors.pop("model.norm.weight", None)
        save_file(tensors, file, {"format": "pt"})
    with weights_left_in_files(), pytest.raises(UserInputError, match=r"lack model\.norm\.weight"):
        load_policy(ModelConfig(path=str(folder)), dtype=torch.float32, seed=0)


def test_a_model_made_in_code_is_whole():
    with weights_left_in_files():
        model = load_policy(ModelConfig(path="builtin:tiny-digits"), dtype=torch.float32, seed=0)
    assert not stored_parameters(model)


@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_blank_tensors_are_zeros_of_their_own(shape):
    one, other = blank_tensor(shape, torch.bfloat16), blank_tensor(shape, torch.bfloat16)
    assert one.shape == torch.Size(shape) and one.dtype == torch.bfloat16 and not one.any()
    one.fill_(1)
    assert not other.any()
