"""`fsdp` in two gloo processes, held against the same training in plain torch."""

from __future__ import annotations

import pytest

from rlhf_core.components import StrategyContext
from rlhf_core.errors import ConfigError
from rlhf_testing.strategy_suite import StrategyCase, optimizer_updates_alone, run_strategies
from rlhf_testing.tiny_training import (
    SHARD_BYTES,
    TINY_RATE,
    Training,
    change_cosine,
    largest_difference,
    moved_fraction,
    tiny_model,
    train_alone,
)

FSDP = StrategyCase("fsdp", "fsdp", optimizers=("muon",))
KEEP = StrategyCase("keep", "fsdp", {"reshard_after_forward": False})
TENSOR = StrategyCase("tensor", "fsdp", {"tensor_parallel": 2, "sequence_parallel": True}, optimizers=("muon",))
SINGLE = StrategyCase("single", "single")

pytestmark = pytest.mark.slow
"""`test_strategies_agree.py` has it in `make test`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def seen(folder):
    """What each case did, each from the model of the one before."""
    return run_strategies([FSDP, KEEP, TENSOR], 2, folder, load_chain=["fsdp", "tensor", "keep"])


@pytest.mark.parametrize("name", ["fsdp", "tensor", "keep"])
@pytest.mark.parametrize("split", ["whole", "accumulated", "ragged", "two_forwards", "checkpointing"])
def test_two_processes_train_as_one(seen, name, split):
    if name == "tensor" and split == "ragged":
        pytest.skip("both processes have all rows")
    alone = train_alone(updates=3)
    got = seen[name][split]
    assert got["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert got["norms"] == pytest.approx(alone["norms"], abs=1e-5)
    assert largest_difference(got["weights"], alone["weights"]) < 1e-6


@pytest.mark.parametrize("name", ["fsdp", "tensor"])
def test_clipping_is_of_the_global_norm(seen, name):
    alone = train_alone(updates=2, max_grad_norm=None)
    assert min(alone["norms"]) > 0.5  # so that clipping, above, did something
    assert seen[name]["unclipped"]["norms"] == pytest.approx(alone["norms"], abs=1e-5)
    assert largest_difference(seen[name]["unclipped"]["weights"], alone["weights"]) < 1e-6


@pytest.mark.parametrize("name", ["fsdp", "tensor"])
def test_lora_trains_adapters_only(seen, name):
    alone = train_alone(updates=2, lora=True)
    weights = seen[name]["lora"]["weights"]
    assert largest_difference(weights, alone["weights"]) < 1e-6
    start = tiny_model(lora=True).state_dict()
    moved = {name for name in weights if not weights[name].equal(start[name])}
    assert moved == {name for name in weights if "lora_" in name}


@pytest.mark.parametrize(("name", "optimizer"), [("fsdp", "muon"), ("tensor", "muon")])
def test_fifty_updates_of_an_optimizer_equal_those_of_one_process(seen, name, optimizer):
    alone, got = optimizer_updates_alone(optimizer), seen[name]["optimizers"][optimizer]
    assert got["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    # Muon rounds to bfloat16, and 8-bit moments to 256 values, so that rounding in a sum may show in a step.
    assert change_cosine(tiny_model(hidden_size=128).state_dict(), got["weights"], alone["weights"]) > 0.999


@pytest.mark.parametrize("name", ["fsdp", "tensor"])
def test_shards_are_bounded_named_and_whole(seen, name):
    shards = seen[name]["shards"]
    start = tiny_model().state_dict()
    assert shards["state_dict"] == list(start)
    assert shards["names"] == [name for name in start if name != "lm_head.weight"]  # tied to the embedding
    assert all(size <= SHARD_BYTES or count == 1 for count, size in shards["sizes"])
    assert len(shards["sizes"]) > 3
    assert shards["only"] == [name for name in start if "norm" in name]
    assert largest_difference(shards["weights"], start) == 0.0


@pytest.mark.parametrize("name", ["fsdp", "tensor", "keep"])
def test_resumes_exactly(seen, name):
    resumed = seen[name]["resumed"]
    assert largest_difference(resumed["saved"], resumed["loaded"]) == 0.0
    assert resumed["resumed"]["losses"] == resumed["uninterrupted"]["losses"]
    assert largest_difference(resumed["resumed"]["weights"], resumed["uninterrupted"]["weights"]) == 0.0


def test_one_broken_rank_refuses_the_step_everywhere(seen):
    diverged = seen["fsdp"]["diverged"]
    assert diverged["refused"] == [True, True]
    assert largest_difference(diverged["before"], diverged["after"]) == 0.0
    assert diverged["next_loss"] == pytest.approx(train_alone(updates=2)["losses"][1], abs=1e-5)


def test_dropped_gradients_leave_no_trace(seen):
    dropped = seen["fsdp"]["dropped"]
    assert largest_difference(dropped["before"], dropped["after"]) == 0.0
    assert largest_difference(dropped["weights"], seen["fsdp"]["accumulated"]["weights"]) == 0.0


def test_16_bit_weights_are_rounded_from_sharded_float32_masters(seen):
    start, alone = tiny_model(dtype="bfloat16").state_dict(), train_alone(updates=3, dtype="bfloat16", lr=TINY_RATE)
    got = seen["fsdp"]["sixteen_bits"]
    # Gradients of the two halves are rounded to bfloat16 before they are added.
    assert change_cosine(start, got["finest"], alone["masters"]) > 0.99
    assert moved_fraction(start, got["finest"]) > 0.99
    assert all(tensor.equal(got["finest"][name].bfloat16()) for name, tensor in got["weights"].items())
    assert got["resumed"]["losses"] == got["uninterrupted"]["losses"]
    assert largest_difference(got["resumed"]["weights"], got["uninterrupted"]["weights"]) == 0.0
    for name, values in got["state"].items():
        assert all(values[key].equal(got["state_again"][name][key]) for key in ("master", "exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("name", ["tensor", "keep"])
def test_another_layout_goes_on(seen, name):
    chain, first = seen[name]["chain"], seen["fsdp"]["resumed"]
    assert chain["next_losses"] == pytest.approx(first["uninterrupted"]["losses"], abs=1e-5)
    assert largest_difference(chain["loaded"], first["saved"]) == 0.0


def test_single_continues_what_fsdp_saved(seen, folder):
    strategy = SINGLE.make()
    strategy.setup()
    training = Training(strategy, seed=7)
    training.load(folder / "fsdp", done=2)
    losses = [training.update(micro_batch=8)[0] for _ in range(2)]
    assert losses == pytest.approx(seen["fsdp"]["resumed"]["uninterrupted"]["losses"], abs=1e-5)
    assert largest_difference(training.weights(), seen["fsdp"]["resumed"]["uninterrupted"]["weights"]) < 1e-6
    strategy.teardown()


def test_offload_without_a_gpu_is_explained():
    from rlhf_torch.config import FsdpConfig
    from rlhf_torch.fsdp import FsdpStrategy

    with pytest.raises(ConfigError, match=r"strategy.offload.*needs a GPU"):
        FsdpStrategy(FsdpConfig(offload=True), StrategyContext(device="cpu"))


def test_blocks_are_the_layers_not_what_is_inside_them():
    from torch import nn

    from rlhf_torch.blocks import transformer_blocks

    block = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Linear(2, 2))
    model = nn.ModuleDict({"layers": nn.ModuleList([block]), "drop": nn.ModuleList([nn.Dropout()])})
    assert transformer_blocks(model) == [block]
