"""Loading, adapting and saving policies."""

import json

import pytest
import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, FalconConfig

from rlhf_core.config.sections import LoraConfig, ModelConfig
from rlhf_core.errors import CheckpointError, UserInputError
from rlhf_core.models import model_kind_for
from rlhf_models import CausalLM, disable_dropout, load_policy, load_tokenizer, merged_weights
from rlhf_plan.meta import meta_model
from rlhf_testing.models import save_tiny_model, tiny_model, tiny_tokenizer

IDS = torch.arange(4, 14)[None]


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def check_model(config):
    model_kind_for(config).check()


def save_plain_model(model, weights, tokenizer, path, adapter=None):
    CausalLM().save_policy(model, weights, tokenizer, path, adapter or path.parent / "adapter")


def load(path, **options):
    return load_policy(ModelConfig(path=str(path), **options), dtype=torch.float32, seed=3)


def randomised(model, seed=5):
    """Every trained weight of an adapter drawn anew: a fresh B is 0 and would hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def gpt2():
    """Conv1D layers, whose weights lie the other way round, with biases and a tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=16, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2)
        )


@pytest.mark.parametrize("make", [tiny_model, gpt2])
@pytest.mark.parametrize("targets", [None, "some"])
def test_the_merged_folder_is_the_adapter_on_its_base(tmp_path, make, targets):
    base = make()
    before = logits(base)
    names = {"some": ["c_attn"] if make is gpt2 else ["q_proj", "down_proj"], None: None}[targets]
    with torch.random.fork_rng(devices=[]):
        model = randomised(CausalLM().add_adapter(base, LoraConfig(r=3, alpha=7.0, target_modules=names), seed=0))
    adapted = logits(model)
    live = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapter = tmp_path / "adapter"
    save_plain_model(model, dict(model.state_dict()), tiny_tokenizer(), tmp_path / "model", adapter=adapter)
    merged = load(tmp_path / "model")
    assert (adapted - before).abs().max() > 1e-2
    assert torch.allclose(logits(merged), adapted, atol=1e-5)
    assert all(torch.equal(tensor, live[name]) for name, tensor in model.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model"]
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["r"] == 3


def test_merging_adds_every_increment_once():
    model = randomised(
        CausalLM().add_adapter(tiny_model(), LoraConfig(r=2, alpha=4.0, target_modules=["q_proj"]), seed=0)
    )
    merged = merged_weights(model, dict(model.state_dict()))
    assert merged.keys() == tiny_model().state_dict().keys()
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    increment = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 2.0
    expected = layer.base_layer.weight + increment
    assert torch.allclose(merged["model.layers.0.self_attn.q_proj.weight"], expected, atol=1e-6)


@pytest.mark.parametrize("with_lora", [False, True])
def test_a_model_whose_module_rounds_is_saved_with_all_digits_of_its_weights(tmp_path, with_lora):
    """As under Gemini and LowLevelZero: bf16 to compute with, float32 for what is trained; frozen ones are bf16."""
    model = tiny_model()
    if with_lora:
        model = randomised(CausalLM().add_adapter(model, LoraConfig(r=2), seed=0))
    weights = {
        name: tensor.bfloat16() if with_lora and "lora_" not in name else tensor.clone()
        for name, tensor in model.state_dict().items()
    }
    expected = tiny_model()
    wide = {name: tensor.float() for name, tensor in weights.items()}
    expected.load_state_dict(merged_weights(model, wide) if with_lora else wide)
    model.to(torch.bfloat16)
    save_plain_model(model, dict(weights), tiny_tokenizer(), tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(tensor.dtype == torch.float32 for tensor in loaded.values())
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in loaded.items())


def test_a_model_of_16_bits_stays_one_of_16_bits(tmp_path):
    model = tiny_model().to(torch.bfloat16)
    save_plain_model(model, dict(model.state_dict()), tiny_tokenizer(), tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


def test_an_adapter_folder_is_merged_before_anything_else(tmp_path):
    base = save_tiny_model(tmp_path / "base")
    model = randomised(CausalLM().add_adapter(load(base), LoraConfig(r=2), seed=0))
    model.peft_config["default"].base_model_name_or_path = str(base)
    adapted = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    tiny_tokenizer().save_pretrained(tmp_path / "adapter")
    check_model(ModelConfig(path=str(tmp_path / "adapter")))
    merged = load(tmp_path / "adapter")
    assert torch.allclose(logits(merged), adapted, atol=1e-5)
    assert all(parameter.requires_grad for parameter in merged.parameters())
    again = load(tmp_path / "adapter", lora={"r": 2})
    with again.disable_adapter():
        assert torch.allclose(logits(again), adapted, atol=1e-5)


def test_a_new_adapter_starts_at_the_base_and_depends_on_the_seed_alone(tmp_path):
    base = save_tiny_model(tmp_path / "base")
    torch.manual_seed(1)
    one = load(base, lora={"r": 2})
    state = torch.random.get_rng_state()
    two = load(base, lora={"r": 2})
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    assert torch.equal(logits(one), logits(load(base)))
    trained = {name for name, p in one.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)


def test_adapters_on_embeddings_are_refused():
    with pytest.raises(UserInputError, match="embedding layers"):
        CausalLM().add_adapter(tiny_model(), LoraConfig(target_modules=["embed_tokens"]), seed=0)


def test_a_model_saved_over_another_replaces_it(tmp_path):
    save_plain_model(tiny_model(seed=1), dict(tiny_model(seed=1).state_dict()), tiny_tokenizer(), tmp_path / "model")
    (tmp_path / "model" / "left-over.safetensors").write_bytes(b"x")
    other = tiny_model(seed=2)
    save_plain_model(other, dict(other.state_dict()), tiny_tokenizer(), tmp_path / "model")
    assert torch.equal(logits(load(tmp_path / "model")), logits(other))
    assert not (tmp_path / "model" / "left-over.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_save_that_fails_leaves_what_was_there(tmp_path):
    model = tiny_model(seed=1)
    save_plain_model(model, dict(model.state_dict()), tiny_tokenizer(), tmp_path / "model")

    class Broken:
        def save_pretrained(self, path):
            raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space"):
        save_plain_model(tiny_model(seed=2), dict(tiny_model(seed=2).state_dict()), Broken(), tmp_path / "model")
    assert torch.equal(logits(load(tmp_path / "model")), logits(model))


def test_every_dropout_is_off():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_dropout = 0.1
            self.dropout = 0.2
            self.layer_dropout = 0.3
            self.resid_pdrop = 0.4
            self.scaling = 0.5
            self.layerdrop = 0.6
            self.jitter_noise = 0.7
            self.config = FalconConfig(hidden_dropout=0.8)
            self.drop = nn.Dropout(0.6)

    module = nn.Sequential(Attention(), nn.Dropout(0.7))
    disable_dropout(module)
    first = module[0]
    assert (first.attention_dropout, first.dropout, first.layer_dropout, first.resid_pdrop) == (0, 0, 0, 0)
    assert (first.scaling, first.drop.p, module[1].p) == (0.5, 0, 0)
    assert (first.layerdrop, first.jitter_noise, first.config.hidden_dropout) == (0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("falcon", {"hidden_dropout": 0.5, "num_attention_heads": 4}),  # reads its config in each forward
        ("opt", {"layerdrop": 0.5, "ffn_dim": 32, "word_embed_proj_dim": 16, "num_attention_heads": 4}),
        ("mixtral", {"router_jitter_noise": 0.5, "num_attention_heads": 4, "num_key_value_heads": 2}),
    ],
)
def test_nothing_is_random_while_training(kind, rates):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=20, hidden_size=16, num_hidden_layers=4, **rates)
    model = AutoModelForCausalLM.from_config(config).eval()
    still = logits(model)
    disable_dropout(model)
    with torch.no_grad():
        assert torch.equal(model.train()(input_ids=IDS).logits, still)


def test_a_gpt2_gives_the_same_logits_while_training(tmp_path):
    gpt2().save_pretrained(tmp_path)
    model = load(tmp_path)
    still = logits(model)
    with torch.no_grad():
        assert torch.equal(model.train()(input_ids=IDS).logits, still)


def test_a_tokenizer_without_pad_pads_with_eos(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert loaded.pad_token_id == loaded.eos_token_id == 2


def test_a_builtin_is_the_same_for_the_same_seed_and_leaves_the_global_generator_alone():
    state = torch.random.get_rng_state()
    one, two = (load("builtin:tiny-digits") for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(logits(one), logits(two))
    other = load_policy(ModelConfig(path="builtin:tiny-digits"), dtype=torch.bfloat16, seed=4)
    assert other.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("builtin:tiny", "builtin:tiny-digits"),
        ("./nowhere", "no folder"),
        ("a/b/c", "no folder"),
        (__file__, "is a file"),
    ],
)
def test_wrong_paths_are_told_without_loading(path, says):
    with pytest.raises(UserInputError, match=says):
        check_model(ModelConfig(path=path))


@pytest.mark.parametrize("layers", [-1, 10**9, 1e999])
@pytest.mark.parametrize("part", [None, "text_config"])
def test_a_count_of_layers_that_no_model_has_is_refused_before_anything_is_built(tmp_path, layers, part):
    folder = save_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (config if part is None else config.setdefault(part, {}))["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config))
    for check in (check_model, meta_model):
        with pytest.raises(UserInputError, match=r"num_hidden_layers.*between 0 and 2,000 layers"):
            check(ModelConfig(path=str(folder)))


def with_layers(folder, layers):
    """Change the count in the folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    return folder


def in_hub_cache(folder, monkeypatch):
    """Have `somebody/some-model` in the cache of an offline machine, in `folder`; its files go to the result."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached = folder / "models--somebody--some-model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    return cached / "snapshots" / ("0" * 40)


@pytest.mark.parametrize("layers", [-1, 10**9])
@pytest.mark.parametrize("at", ["folder", "hub"])
def test_the_layers_of_an_adapters_base_are_checked(tmp_path, monkeypatch, at, layers):
    base = tmp_path / "base" if at == "folder" else in_hub_cache(tmp_path / "cache", monkeypatch)
    with_layers(save_tiny_model(base), layers)
    adapter = save_tiny_model(tmp_path / "adapter")
    name = str(base) if at == "folder" else "somebody/some-model"
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name}))
    for check in (check_model, meta_model, load_tokenizer, lambda config: load(config.path)):
        with pytest.raises(UserInputError, match=r"num_hidden_layers.*between 0 and 2,000 layers"):
            check(ModelConfig(path=str(adapter)))


@pytest.mark.parametrize("layers", [-1, 10**9])
def test_the_layers_of_a_hub_name_are_checked(tmp_path, monkeypatch, layers):
    with_layers(save_tiny_model(in_hub_cache(tmp_path, monkeypatch)), layers)
    for check in (check_model, meta_model, load_tokenizer, lambda config: load(config.path)):
        with pytest.raises(UserInputError, match=r"num_hidden_layers.*between 0 and 2,000 layers"):
            check(ModelConfig(path="somebody/some-model"))


def test_a_config_that_is_nested_without_end_is_refused(tmp_path):
    folder = save_tiny_model(tmp_path / "model")
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserInputError, match="cannot be read"):
        check_model(ModelConfig(path=str(folder)))


def test_a_hub_name_can_only_be_known_when_it_is_loaded():
    check_model(ModelConfig(path="somebody/some-model"))


def test_a_model_that_the_disk_does_not_take_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    """safetensors has an error of its own for it, which is no OSError."""
    model = tiny_model()

    def full(model, weights, path):
        path.mkdir()
        (path / "model.safetensors").write_text("half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("rlhf_models.causal_lm.write_transformers_folder", full)
    with pytest.raises(CheckpointError, match="No space left(.|\n)*free some space"):
        save_plain_model(model, dict(model.state_dict()), tiny_tokenizer(), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_an_adapter_that_the_disk_does_not_take_is_told_and_leaves_the_old_one(tmp_path, monkeypatch):
    model = CausalLM().add_adapter(tiny_model(), LoraConfig(r=2), seed=0)
    weights = dict(model.state_dict())
    save_plain_model(model, weights, tiny_tokenizer(), tmp_path / "model", adapter=tmp_path / "adapter")

    def full(*_, **options):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("peft.peft_model.safe_save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_plain_model(model, weights, tiny_tokenizer(), tmp_path / "model", adapter=tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model"]
