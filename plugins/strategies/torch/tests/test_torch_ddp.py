"""`torch-ddp` in two gloo processes, held against the same training in plain torch."""

from __future__ import annotations

import pytest

from rlhf_strategies import TorchDdpConfig
from rlhf_testing.strategy_suite import StrategyCase, optimizer_updates_alone, run_strategies
from rlhf_testing.tiny_training import (
    SHARD_BYTES,
    TINY_RATE,
    change_cosine,
    largest_difference,
    moved_fraction,
    tiny_model,
    train_alone,
)

pytestmark = pytest.mark.slow
"""`test_strategies_agree.py` has it in `make test`."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run_strategies(
        [StrategyCase("ddp", "torch-ddp", optimizers=("muon", "adamw-8bit"))], 2, tmp_path_factory.mktemp("ddp")
    )["ddp"]


@pytest.mark.parametrize("split", ["whole", "accumulated", "ragged", "two_forwards", "checkpointing"])
def test_two_processes_train_as_one(seen, split):
    alone = train_alone(updates=3)
    assert seen[split]["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert seen[split]["norms"] == pytest.approx(alone["norms"], abs=1e-5)
    assert largest_difference(seen[split]["weights"], alone["weights"]) < 1e-6


def test_clipping_is_of_the_global_norm(seen):
    alone = train_alone(updates=2, max_grad_norm=None)
    assert seen["unclipped"]["norms"] == pytest.approx(alone["norms"], abs=1e-5)
    assert largest_difference(seen["unclipped"]["weights"], alone["weights"]) < 1e-6


def test_lora_trains_adapters_only(seen):
    alone, start = train_alone(updates=2, lora=True), tiny_model(lora=True).state_dict()
    weights = seen["lora"]["weights"]
    assert largest_difference(weights, alone["weights"]) < 1e-6
    assert {name for name in weights if not weights[name].equal(start[name])} == {n for n in weights if "lora_" in n}


@pytest.mark.parametrize("optimizer", ["muon", "adamw-8bit"])
def test_fifty_updates_of_an_optimizer_equal_those_of_one_process(seen, optimizer):
    alone, got = optimizer_updates_alone(optimizer), seen["optimizers"][optimizer]
    assert got["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    # Muon rounds to bfloat16, so that rounding in a sum may show in a step: 0.99999 was measured.
    assert change_cosine(tiny_model(hidden_size=128).state_dict(), got["weights"], alone["weights"]) > 0.9999


def test_shards_are_bounded_named_and_whole(seen):
    shards, start = seen["shards"], tiny_model().state_dict()
    assert shards["names"] == [name for name in start if name != "lm_head.weight"]  # tied to the embedding
    assert all(size <= SHARD_BYTES or count == 1 for count, size in shards["sizes"])
    assert largest_difference(shards["weights"], start) == 0.0


def test_resumes_exactly(seen):
    resumed = seen["resumed"]
    assert largest_difference(resumed["saved"], resumed["loaded"]) == 0.0
    assert resumed["resumed"]["losses"] == resumed["uninterrupted"]["losses"]
    assert largest_difference(resumed["resumed"]["weights"], resumed["uninterrupted"]["weights"]) == 0.0


def test_one_broken_rank_refuses_the_step_everywhere(seen):
    assert seen["diverged"]["refused"] == [True, True]
    assert largest_difference(seen["diverged"]["before"], seen["diverged"]["after"]) == 0.0


def test_dropped_gradients_leave_no_trace(seen):
    assert largest_difference(seen["dropped"]["before"], seen["dropped"]["after"]) == 0.0
    assert largest_difference(seen["dropped"]["weights"], seen["accumulated"]["weights"]) == 0.0


def test_16_bit_weights_have_float32_masters(seen):
    start, alone = tiny_model(dtype="bfloat16").state_dict(), train_alone(updates=3, dtype="bfloat16", lr=TINY_RATE)
    assert change_cosine(start, seen["sixteen_bits"]["finest"], alone["masters"]) > 0.95
    assert moved_fraction(start, seen["sixteen_bits"]["finest"]) > 0.99


def test_every_option_is_described():
    assert all(field.description for field in TorchDdpConfig.model_fields.values())
