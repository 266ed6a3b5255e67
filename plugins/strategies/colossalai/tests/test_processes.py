"""`ddp`, `low-level-zero` and `gemini` in two gloo processes, held against the same training in plain torch."""

from __future__ import annotations

import math

import pytest

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

CASES = [
    StrategyCase("ddp", "ddp"),
    StrategyCase("ddp-optimizers", "ddp", optimizers=("muon", "adamw-8bit")),
    StrategyCase("zero1", "low-level-zero"),
    StrategyCase("zero2", "low-level-zero", {"stage": 2}),
    StrategyCase("zero1-bf16", "low-level-zero", {"precision": "bf16"}),
    StrategyCase("gemini", "gemini"),
    StrategyCase("gemini-half-sharded", "gemini", {"shard_param_frac": 0.5}),
]
EXACT = ["ddp", "zero1", "zero2"]
ROUNDED = ["zero1-bf16", "gemini", "gemini-half-sharded"]
SPLITS = ["whole", "accumulated", "ragged", "two_forwards", "checkpointing"]
CHAIN = ["gemini", "zero1-bf16", "zero1", "ddp"]

pytestmark = pytest.mark.slow
"""`test_strategies_agree.py` has it in `make test`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("colossalai")


@pytest.fixture(scope="module")
def seen(folder):
    """What each case did."""
    return run_strategies(CASES, 2, folder, load_chain=CHAIN)


@pytest.mark.parametrize("optimizer", ["muon", "adamw-8bit"])
def test_fifty_updates_of_an_optimizer_equal_those_of_one_process(seen, optimizer):
    alone, got = optimizer_updates_alone(optimizer), seen["ddp-optimizers"]["optimizers"][optimizer]
    assert got["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    # Muon rounds to bfloat16, and 8-bit moments to 256 values, so that rounding in a sum may show in a step.
    assert change_cosine(tiny_model(hidden_size=128).state_dict(), got["weights"], alone["weights"]) > 0.999


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("split", SPLITS)
def test_two_fp32_processes_train_as_one(seen, name, split):
    alone = train_alone(updates=3)
    got = seen[name][split]
    assert got["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert got["norms"] == pytest.approx(alone["norms"], abs=1e-5)
    assert largest_difference(got["weights"], alone["weights"]) < 1e-6


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("split", SPLITS)
def test_two_bf16_processes_train_nearly_as_one(seen, name, split):
    alone = train_alone(updates=3)
    got = seen[name][split]
    assert got["losses"] == pytest.approx(alone["losses"], rel=2e-3)
    assert got["norms"] == pytest.approx(alone["norms"], rel=2e-2)
    assert change_cosine(tiny_model().state_dict(), got["weights"], alone["weights"]) > 0.95


@pytest.mark.parametrize("name", EXACT + ROUNDED)
def test_norm_is_measured_without_clipping_too(seen, name):
    alone = train_alone(updates=2, max_grad_norm=None)
    got = seen[name]["unclipped"]
    assert got["norms"] == pytest.approx(alone["norms"], rel=1e-5 if name in EXACT else 2e-2)
    if name in EXACT:
        assert largest_difference(got["weights"], alone["weights"]) < 1e-6


@pytest.mark.parametrize("name", EXACT + ROUNDED)
def test_lora_trains_adapters_only(seen, name):
    alone = train_alone(updates=2, lora=True)
    start = tiny_model(lora=True).state_dict()
    assert seen[name]["lora"]["losses"] == pytest.approx(alone["losses"], rel=1e-5 if name in EXACT else 2e-3)
    weights = seen[name]["lora"]["weights"]
    adapters = {key: tensor for key, tensor in weights.items() if "lora_" in key}
    assert change_cosine(start, adapters, alone["weights"]) > 0.95
    assert all(not adapters[key].equal(start[key]) for key in adapters)
    frozen = {key: tensor for key, tensor in weights.items() if "lora_" not in key}
    # A frozen weight is kept in the type of the arithmetic: rounded once, never moved.
    assert all(frozen[key].equal(start[key].to(frozen[key].dtype)) for key in frozen)


@pytest.mark.parametrize("name", EXACT + ROUNDED)
def test_shards_are_bounded_named_and_whole(seen, name):
    shards = seen[name]["shards"]
    start = tiny_model().state_dict()
    assert shards["state_dict"] == list(start)
    assert shards["names"] == [key for key in start if key != "lm_head.weight"]  # tied to the embedding
    assert all(size <= SHARD_BYTES or count == 1 for count, size in shards["sizes"])
    assert len(shards["sizes"]) > 3
    assert shards["only"] == [key for key in start if "norm" in key]
    assert largest_difference(shards["weights"], start) == 0.0  # fp32 digits, whatever the arithmetic


@pytest.mark.parametrize("name", EXACT + ROUNDED)
def test_resumes_exactly(seen, name):
    resumed = seen[name]["resumed"]
    assert largest_difference(resumed["saved"], resumed["loaded"]) == 0.0
    assert resumed["resumed"]["losses"] == resumed["uninterrupted"]["losses"]
    assert largest_difference(resumed["resumed"]["weights"], resumed["uninterrupted"]["weights"]) == 0.0


@pytest.mark.parametrize("name", EXACT + ROUNDED)
def test_dropped_gradients_leave_no_trace(seen, name):
    dropped = seen[name]["dropped"]
    assert largest_difference(dropped["before"], dropped["after"]) == 0.0
    assert largest_difference(dropped["weights"], seen[name]["accumulated"]["weights"]) == 0.0


@pytest.mark.parametrize("name", EXACT + ROUNDED)
def test_weights_loaded_in_16_bits_have_float32_masters(seen, name):
    start, alone = tiny_model(dtype="bfloat16").state_dict(), train_alone(updates=3, dtype="bfloat16", lr=TINY_RATE)
    got = seen[name]["sixteen_bits"]
    assert change_cosine(start, got["finest"], alone["masters"]) > 0.95
    assert moved_fraction(start, got["finest"]) > 0.99
    assert got["resumed"]["losses"] == got["uninterrupted"]["losses"]
    assert largest_difference(got["resumed"]["weights"], got["uninterrupted"]["weights"]) == 0.0


@pytest.mark.parametrize("name", EXACT + ROUNDED)
def test_one_broken_rank_refuses_the_step_everywhere(seen, name):
    diverged = seen[name]["diverged"]
    assert diverged["refused"] == [True, True]
    assert largest_difference(diverged["before"], diverged["after"]) == 0.0
    assert diverged["next_loss"] == pytest.approx(
        train_alone(updates=2)["losses"][1], rel=1e-5 if name in EXACT else 2e-3
    )


def test_each_strategy_continues_what_another_saved(seen, folder):
    saved = seen["gemini"]["resumed"]["saved"]
    for name in CHAIN[1:]:
        chain = seen[name]["chain"]
        assert largest_difference(saved, chain["loaded"]) == 0.0
        assert chain["next_losses"] == pytest.approx(seen["gemini"]["resumed"]["uninterrupted"]["losses"], rel=2e-3)
        assert not any(math.isnan(loss) for loss in chain["next_losses"])


def test_the_saved_folder_is_what_transformers_reads(seen, folder):
    from transformers import LlamaForCausalLM

    source = tiny_model()
    source.config.save_pretrained(folder / "gemini")
    model = LlamaForCausalLM.from_pretrained(folder / "gemini")
    assert largest_difference(seen["gemini"]["resumed"]["saved"], model.state_dict()) == 0.0
