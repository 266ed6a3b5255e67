"""`single` held against the same training in plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.components import StrategyContext
from rlhf_core.errors import CheckpointError, UserInputError
from rlhf_core.util.tensor_files import load_tree
from rlhf_strategies.parts import make_adamw
from rlhf_testing.strategy_suite import StrategyCase, observe
from rlhf_testing.tiny_training import TINY_RATE, Training, largest_difference, moved_fraction, tiny_model, train_alone
from rlhf_torch.config import SingleConfig
from rlhf_torch.single import SingleStrategy

SINGLE = StrategyCase("single", "single")


@pytest.fixture
def strategy():
    made = SINGLE.make()
    made.setup()
    yield made
    made.teardown()


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    made = SINGLE.make()
    made.setup()
    yield observe(made, tmp_path_factory.mktemp("single"))
    made.teardown()


@pytest.mark.parametrize("split", ["whole", "accumulated", "two_forwards", "checkpointing"])
def test_trains_as_plain_torch(seen, split):
    alone = train_alone(updates=3)
    assert seen[split]["losses"] == pytest.approx(alone["losses"], abs=1e-6)
    assert seen[split]["norms"] == pytest.approx(alone["norms"], abs=1e-6)
    assert largest_difference(seen[split]["weights"], alone["weights"]) < 1e-6


def test_resumes_exactly(seen):
    resumed = seen["resumed"]
    assert largest_difference(resumed["saved"], resumed["loaded"]) == 0.0
    assert resumed["resumed"]["losses"] == resumed["uninterrupted"]["losses"]
    assert largest_difference(resumed["resumed"]["weights"], resumed["uninterrupted"]["weights"]) == 0.0


def test_16_bit_weights_are_rounded_from_float32_masters(seen):
    """At this rate 99% of bfloat16 weights could not make a step: they and AdamW's moments are float32 inside."""
    alone = train_alone(updates=3, dtype="bfloat16", lr=TINY_RATE)
    start, got = tiny_model(dtype="bfloat16").state_dict(), seen["sixteen_bits"]
    assert got["losses"] == alone["losses"]
    assert largest_difference(got["finest"], alone["masters"]) < 1e-9
    assert moved_fraction(start, got["finest"]) > 0.99
    for name, tensor in got["weights"].items():
        assert tensor.dtype == torch.bfloat16
        assert tensor.equal(got["finest"][name].bfloat16())
    assert {values["exp_avg_sq"].dtype for values in got["state"].values()} == {torch.float32}


def test_16_bit_weights_resume_with_all_digits_of_their_masters(seen):
    got = seen["sixteen_bits"]
    for name, values in got["state"].items():
        assert all(values[key].equal(got["state_again"][name][key]) for key in ("master", "exp_avg", "exp_avg_sq"))
    assert got["resumed"]["losses"] == got["uninterrupted"]["losses"]
    assert largest_difference(got["resumed"]["weights"], got["uninterrupted"]["weights"]) == 0.0


def test_masters_go_to_float32_weights_and_back(strategy, tmp_path):
    half = Training(strategy, dtype="bfloat16", lr=TINY_RATE)
    half.update()
    half.save(tmp_path / "half")
    whole = Training(strategy, seed=7, lr=TINY_RATE)
    whole.load(tmp_path / "half", done=1)
    masters = {n: v["master"] for n, v in load_tree(tmp_path / "half" / "optimizer.safetensors")["state"].items()}
    assert largest_difference(masters, whole.weights()) == 0.0
    whole.save(tmp_path / "whole")
    again = Training(strategy, seed=8, dtype="bfloat16", lr=TINY_RATE)
    again.load(tmp_path / "whole", done=1)
    again.save(tmp_path / "again")
    back = {n: v["master"] for n, v in load_tree(tmp_path / "again" / "optimizer.safetensors")["state"].items()}
    assert largest_difference(masters, back) == 0.0


def test_adapters_on_16_bit_weights_are_float32_and_need_no_masters(strategy, tmp_path):
    training = Training(strategy, lora=True, dtype="bfloat16", lr=TINY_RATE)
    start = training.weights()
    for _ in range(2):
        training.update()
    for name, tensor in training.weights().items():
        assert tensor.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
        assert bool((tensor != start[name]).float().mean() > 0.9) == ("lora_" in name)
    training.save(tmp_path)
    state = load_tree(tmp_path / "optimizer.safetensors")["state"]
    assert not any("master" in values for values in state.values())


def test_the_optimizers_own_state_dict_keeps_the_digits():
    """What a ColossalAI Booster saves and loads by."""
    weight = torch.nn.Parameter(torch.linspace(0.5, 1, 64).bfloat16())

    def stepped(optimizer, parameter, times):
        for _ in range(times):
            parameter.grad = torch.linspace(-1, 1, 64).bfloat16()
            optimizer.step()
            optimizer.zero_grad()

    first = make_adamw([weight], 1e-6, (0.9, 0.999), 1e-8, 0.0)
    stepped(first, weight, 3)
    other = torch.nn.Parameter(weight.detach().clone())
    second = make_adamw([other], 1e-6, (0.9, 0.999), 1e-8, 0.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    stepped(first, weight, 2)
    stepped(second, other, 2)
    for key, value in first.state[weight].items():
        assert value.dtype == torch.float32
        assert value.equal(second.state[other][key])


def test_what_one_process_holds(strategy):
    assert strategy.state_bytes(1, torch.float32) == (4, 4, 8, 4, 1)
    assert strategy.state_bytes(1, torch.bfloat16) == (2, 4, 12, 2, 1)


def test_a_gradient_that_is_not_finite_changes_nothing(seen):
    assert seen["diverged"]["refused"] == [True]
    assert largest_difference(seen["diverged"]["before"], seen["diverged"]["after"]) == 0.0


def test_collectives_of_one(strategy):
    value = torch.tensor([1.5, 2.5], dtype=torch.float64)
    reduced = strategy.all_reduce(value)
    assert reduced.equal(value)
    assert reduced.dtype == torch.float64
    assert reduced.data_ptr() != value.data_ptr()
    assert strategy.all_gather_objects({"a": 1}) == [{"a": 1}]
    assert (strategy.rank, strategy.world_size, strategy.gradient_average_factor) == (0, 1, 1)
    assert not strategy.shards_parameters


def test_bf16_is_autocast_over_fp32_weights():
    case = StrategyCase("single", "single", {"precision": "bf16"})
    strategy = case.make()
    training = Training(strategy)
    with strategy.autocast():
        logits = training.trained.model(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits
    assert logits.dtype == torch.bfloat16 == strategy.compute_dtype
    assert training.update()[0] == pytest.approx(train_alone(updates=1)["losses"][0], rel=1e-2)
    assert {tensor.dtype for tensor in training.weights().values()} == {torch.float32}


def test_fp16_lowers_the_scale_until_gradients_are_finite():
    case = StrategyCase("single", "single", {"precision": "fp16"})
    strategy = case.make()
    training = Training(strategy)
    scale = strategy.prepared_of(training.trained.optimizer).loss_scale
    scale.scale = 2.0**30  # far past what fp16 holds
    before = training.weights()
    assert training.update()[1] == float("inf")
    assert scale.scale == 2.0**29
    assert largest_difference(before, training.weights()) == 0.0
    scale.scale = 2.0**10
    assert training.update()[1] < 10


def test_several_processes_are_refused_with_the_word_to_change(monkeypatch):
    for key, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserInputError, match=r"--strategy torch-ddp"):
        SingleStrategy(SingleConfig(), StrategyContext(device="cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(strategy):
    with pytest.raises(UserInputError, match="no GPU"):
        SingleStrategy(SingleConfig(), StrategyContext(device="cuda"))


def test_unknown_options_and_precisions_are_errors():
    with pytest.raises(ValidationError, match="Extra inputs"):
        SingleConfig(stage=2)
    with pytest.raises(ValidationError, match="fp8|Input should be"):
        SingleConfig(precision="fp8")


def test_another_models_state_is_refused(strategy, tmp_path):
    Training(strategy).save(tmp_path)
    with pytest.raises(CheckpointError, match="other parameters"):
        strategy.load_optimizer(Training(strategy, lora=True).trained.optimizer, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="contains no model"):
        Training(strategy).load(tmp_path, done=0)


def test_a_write_that_fails_still_gathers_every_shard(strategy, tmp_path, monkeypatch):
    """The other processes gather them too, and would wait for this one."""
    (tmp_path / "file").touch()
    gathered = []

    def shards(*_):
        for index in range(3):
            gathered.append(index)
            yield {str(index): torch.zeros(2)}

    monkeypatch.setattr(strategy, "state_dict_shards", shards)
    monkeypatch.setattr("rlhf_strategies.base.DEFAULT_SHARD_BYTES", 8)
    with pytest.raises(CheckpointError, match="cannot be written"):
        strategy.save_model(tiny_model(), tmp_path / "file" / "model")
    assert gathered == [0, 1, 2]
