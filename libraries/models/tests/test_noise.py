"""Noise of training mode is found by what a forward draws, under whatever name."""

import copy
import random

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_core.config.resolve import resolve
from rlhf_core.config.sections import LoraConfig
from rlhf_core.errors import UserInputError
from rlhf_core.wiring import RunInputs, TrainerParts, build_strategy
from rlhf_models import CausalLM, disable_dropout
from rlhf_models.noise import disable_training_noise
from rlhf_testing.models import tiny_model, tiny_tokenizer

IDS = torch.arange(4, 14).repeat(8, 1)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def moe(kind, **rates):
    """A tiny mixture of experts, two a token, with the noise of `rates`."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 20}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads, **rates))


class Noise(nn.Module):
    """Noise under a name of its own, in training mode or always."""

    def __init__(self, *, always=False, draw=torch.randn_like):
        super().__init__()
        self.always, self.draw = always, draw

    def forward(self, hidden):
        return hidden + self.draw(hidden) if self.training or self.always else hidden


def noisy(**options):
    model = tiny_model()
    model.model.norm = nn.Sequential(model.model.norm, Noise(**options))
    return model


@pytest.mark.parametrize(
    "rates", [{"router_jitter_noise": 0.3}, {"router_jitter_noise": 0.01, "input_jitter_noise": 0.3}]
)
def test_phimoe_computes_the_same_while_training(rates):
    model = moe("phimoe", **rates)
    still = logits(model.eval())
    assert not torch.equal(logits(model.train()), still)
    disable_dropout(model)
    disable_training_noise(model)
    assert torch.equal(logits(model.train()), still)
    assert model.model.layers[0].training, "only what draws leaves training mode"


def test_noise_of_any_name_is_found_and_stays_off_in_a_copy():
    model = noisy()
    still = logits(model.eval())
    before = torch.get_rng_state()
    disable_training_noise(model)
    assert not model.training and torch.equal(torch.get_rng_state(), before)
    for each in (model, copy.deepcopy(model)):
        assert torch.equal(logits(each.train()), still)
        assert [name for name, module in each.named_modules() if not module.training] == ["model.norm.1"]


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        (torch.randn_like, r"model\.norm\.1 \(Noise\)"),
        (lambda hidden: 10.0 * random.random(), "outside of torch's generator"),
    ],
)
def test_a_model_that_stays_noisy_is_refused(draw, says):
    with pytest.raises(UserInputError, match=says):
        disable_training_noise(noisy(always=True, draw=draw))


def test_an_adapters_dropout_is_meant():
    model = CausalLM().add_adapter(tiny_model(), LoraConfig(r=2, dropout=0.5), seed=1)
    disable_training_noise(model.train())
    rates = {m.p for m in model.modules() if isinstance(m, nn.Dropout)}
    assert rates == {0.5} and model.training


def test_a_run_trains_phimoe_without_its_noise(tmp_path):
    moe("phimoe", router_jitter_noise=0.3).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    prompts = {"name": "sort-digits", "size": 100}
    run = {"algorithm": "grpo", "model": {"path": str(tmp_path)}, "prompts": prompts, "rewards": ["exact-match"]}
    resolved = resolve(run | {"train": {"episodes": 1, "prompts_per_episode": 2, "samples_per_prompt": 2}})
    policy = TrainerParts(RunInputs(resolved), build_strategy(resolved)).models["policy"]
    assert torch.equal(logits(policy.train()), logits(policy.train()))
