"""The strategies in one process with no launcher: a group of one, on no port."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlhf_colossalai.config import DdpConfig, GeminiConfig, LowLevelZeroConfig
from rlhf_core.components import StrategyContext
from rlhf_core.errors import ConfigError
from rlhf_core.plugins import load
from rlhf_testing.strategy_suite import StrategyCase
from rlhf_testing.tiny_training import Training, largest_difference, tiny_model, train_alone

NAMES = ("ddp", "low-level-zero", "gemini")


def made_of(name, **options):
    return StrategyCase(name, name, options).make()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for key in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)


@pytest.fixture(params=NAMES)
def strategy(request):
    made = made_of(request.param)
    made.setup()
    yield made
    made.teardown()
    assert not dist.is_initialized()


@pytest.mark.slow_except("low-level-zero")
def test_trains_alone(strategy):
    training = Training(strategy)
    losses = [training.update()[0] for _ in range(2)]
    exact = strategy.precision == "fp32"
    alone = train_alone(updates=2)
    assert losses == pytest.approx(alone["losses"], rel=1e-5 if exact else 2e-3)
    if exact:
        assert largest_difference(training.weights(), alone["weights"]) < 1e-6


@pytest.mark.parametrize("name", ["low-level-zero", "gemini"])
@pytest.mark.slow_except("low-level-zero")
def test_fp16_scales_its_loss_and_trains(name):
    strategy = made_of(name, precision="fp16")
    strategy.setup()
    try:
        training, alone = Training(strategy), train_alone(updates=2)
        losses, norms = zip(*(training.update() for _ in range(2)), strict=True)
    finally:
        strategy.teardown()
    assert losses == pytest.approx(alone["losses"], rel=2e-3)
    assert norms == pytest.approx(alone["norms"], rel=2e-3)


@pytest.mark.slow
def test_two_models_train_side_by_side(strategy):
    policy, critic = Training(strategy), Training(strategy, seed=3)
    for _ in range(2):
        policy.update()
        critic.update()
    again = Training(strategy)
    for _ in range(2):
        again.update()
    assert largest_difference(policy.weights(), again.weights()) == 0.0


def test_weights_beside_an_adapter_are_plain_tensors(strategy):
    weights = Training(strategy, lora=True).weights()  # says which is not
    start = tiny_model(lora=True).state_dict()
    assert all(tensor.equal(start[name].to(tensor.dtype)) for name, tensor in weights.items())


def test_a_frozen_model_answers_as_the_trained_one_does_before_its_first_update(strategy):
    reference = strategy.prepare_inference(tiny_model())
    policy = Training(strategy).trained.model
    ids = torch.arange(10)[None]
    with torch.no_grad(), strategy.autocast():
        assert reference(input_ids=ids).logits.equal(policy(input_ids=ids).logits)
    assert not any(parameter.requires_grad for parameter in reference.parameters())


def test_a_strategy_says_what_its_forward_multiplies_in(strategy):
    policy = Training(strategy).trained.model
    with torch.no_grad(), strategy.autocast():
        logits = policy(input_ids=torch.arange(10)[None]).logits
    assert logits.dtype == (strategy.compute_dtype or torch.float32)


def test_rotary_frequencies_stay_fp32(strategy):
    rotary = strategy.unwrap(Training(strategy).trained.model).model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    assert rotary.inv_freq.equal(tiny_model().model.rotary_emb.inv_freq)


def test_an_optimizer_that_was_not_prepared_is_a_bug(strategy):
    with pytest.raises(ValueError, match="not returned by"):
        strategy.prepared_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("ddp", DdpConfig(), (4, 4, 8, 4)),
        ("low-level-zero", LowLevelZeroConfig(), (4, 4, 2, 4)),
        ("low-level-zero", LowLevelZeroConfig(stage=2, precision="bf16"), (2, 0.5, 3, 2)),
        ("gemini", GeminiConfig(), (0.5, 0.5, 3, 2)),
        ("gemini", GeminiConfig(shard_param_frac=0.5), (1.25, 0.5, 3, 2)),
    ],
)
def test_what_one_of_four_processes_holds(name, config, expected):
    strategy = load("strategies", name).build(config, StrategyContext(device="cpu"))
    assert strategy.state_bytes(4, torch.float32) == (*expected, 1.0)


@pytest.mark.parametrize(
    ("name", "config", "key"),
    [
        ("gemini", GeminiConfig(offload_optim_frac=0.5), "offload_optim_frac"),
        ("low-level-zero", LowLevelZeroConfig(cpu_offload=True), "cpu_offload"),
    ],
)
def test_offload_without_a_gpu_is_explained(name, config, key):
    with pytest.raises(ConfigError, match=rf"strategy.{key}.*needs a GPU"):
        load("strategies", name).build(config, StrategyContext(device="cpu"))
