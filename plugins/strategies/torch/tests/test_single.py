"""`single` held against the same training in plain torch."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.components import StrategyContext
from rlhf_core.errors import CheckpointError, UserInputError
from rlhf_core.testing.strategy_suite import (
    StrategyCase,
    Training,
    largest_difference,
    observe,
    train_alone,
)
from rlhf_torch.config import SingleConfig
from rlhf_torch.single import build

SINGLE = StrategyCase("single", "rlhf_torch.single:build", "rlhf_torch.config:SingleConfig")


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
    case = StrategyCase("single", SINGLE.build, SINGLE.config, {"precision": "bf16"})
    strategy = case.make()
    training = Training(strategy)
    with strategy.autocast():
        logits = training.trained.model(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits
    assert logits.dtype == torch.bfloat16 == strategy.compute_dtype
    assert training.update()[0] == pytest.approx(train_alone(updates=1)["losses"][0], rel=1e-2)
    assert {tensor.dtype for tensor in training.weights().values()} == {torch.float32}


def test_fp16_lowers_the_scale_until_gradients_are_finite():
    case = StrategyCase("single", SINGLE.build, SINGLE.config, {"precision": "fp16"})
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
    with pytest.raises(UserInputError, match=r"--strategy ddp"):
        build(SingleConfig(), StrategyContext(device="cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(strategy):
    with pytest.raises(UserInputError, match="no GPU"):
        build(SingleConfig(), StrategyContext(device="cuda"))


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
    with pytest.raises(CheckpointError, match="holds no model"):
        Training(strategy).load(tmp_path, done=0)
