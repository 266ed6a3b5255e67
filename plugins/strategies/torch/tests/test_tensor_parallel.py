"""`tensor_parallel` of `fsdp`: which models can be split, and two groups of two processes held against one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from rlhf_core.components import StrategyContext
from rlhf_core.config import processes
from rlhf_core.config.resolve import resolve
from rlhf_core.errors import ConfigError, UserInputError
from rlhf_core.strategy import StateBytes
from rlhf_testing.runs import tiny_run
from rlhf_testing.strategy_suite import StrategyCase, run_strategies
from rlhf_testing.tiny_training import largest_difference, tiny_model, train_alone
from rlhf_torch.config import FsdpConfig
from rlhf_torch.fsdp import FsdpStrategy
from rlhf_torch.tensor_parallel_plan import plan_of

SMALL = {"vocab_size": 16, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1}


def llama(heads: int, key_value_heads: int, **changes: int) -> nn.Module:
    config = {**SMALL, "num_attention_heads": heads, "num_key_value_heads": key_value_heads, **changes}
    return LlamaForCausalLM(LlamaConfig(**config))


def test_the_plan_is_the_models_own():
    model = tiny_model(lora=True)
    plan = plan_of(model, 2)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    styles = {
        names[key].split("layers.0.")[1]: style for key, style in plan.styles.items() if "layers.0." in names[key]
    }
    assert styles == {
        "self_attn.q_proj.base_layer.weight": "rows",
        "self_attn.q_proj.lora_A.default.weight": "whole",
        "self_attn.q_proj.lora_B.default.weight": "rows",
        "self_attn.k_proj.weight": "rows",
        "self_attn.v_proj.base_layer.weight": "rows",
        "self_attn.v_proj.lora_A.default.weight": "whole",
        "self_attn.v_proj.lora_B.default.weight": "rows",
        "self_attn.o_proj.base_layer.weight": "columns",
        "self_attn.o_proj.lora_A.default.weight": "columns",
        "self_attn.o_proj.lora_B.default.weight": "whole",
        "mlp.gate_proj.weight": "rows",
        "mlp.up_proj.weight": "rows",
        "mlp.down_proj.weight": "columns",
    }
    assert len(plan.parents) == len(plan.rowwise) == 4  # an attention and an MLP in each of two blocks


def test_what_cannot_be_split_is_refused_by_name():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(UserInputError, match=r"a tensor-parallel plan for model type 'gpt2'.*\n.*tensor_parallel=1"):
        plan_of(gpt2, 2)
    with pytest.raises(
        UserInputError, match=r"12 attention heads and 6 key-value heads equally.*\n.*tensor_parallel=3"
    ):
        plan_of(llama(12, 6), 4)
    with pytest.raises(UserInputError, match=r"share the 33 rows of layers.0.mlp.gate_proj.weight"):
        plan_of(llama(4, 2, intermediate_size=33), 2)
    phi3 = Phi3ForCausalLM(Phi3Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0))
    with pytest.raises(UserInputError, match=r"model type 'phi3' splits layers.0"):
        plan_of(phi3, 2)
    model = llama(4, 2)
    model.model.layers[0].mlp.register_parameter(
        "gain", nn.Parameter(nn.init.ones_(model.lm_head.weight[:1, 0].clone()))
    )
    with pytest.raises(UserInputError, match=r"does not specify how to split its weight layers.0.mlp.gain"):
        plan_of(model, 2)


def test_a_run_of_part_of_a_group_is_refused_before_anything_starts():
    run = resolve(tiny_run({"strategy": {"name": "fsdp", "tensor_parallel": 2}}))
    processes.check_processes(run, 4)
    with pytest.raises(ConfigError, match=r"3 do not form groups of 2.*\n.*--num-processes 2"):
        processes.check_processes(run, 3)
    detached = {"strategy": {"name": "fsdp", "tensor_parallel": 2}, "transport": {"name": "ray", "num_trainers": 1}}
    with pytest.raises(ConfigError, match=r"transport.num_trainers=2"):
        processes.check_processes(resolve(tiny_run(detached)), 1)


class Group:
    """The process group, seen by its last process of four."""

    rank, world_size = 3, 4

    def all_gather_objects(self, value):
        return ["first", "second", "third", value]


def test_processes_form_whole_groups(monkeypatch):
    strategy = FsdpStrategy(FsdpConfig(tensor_parallel=3), StrategyContext(device="cpu"))
    strategy.group = Group()
    monkeypatch.setattr(Group, "join", lambda self: None, raising=False)
    with pytest.raises(UserInputError, match=r"4 processes do not form groups of 3.*\n.*a multiple of 3"):
        strategy.setup()


def test_processes_of_a_group_are_one_rank():
    strategy = FsdpStrategy(FsdpConfig(tensor_parallel=2), StrategyContext(device="cpu"))
    strategy.group, strategy._mesh = Group(), object()
    assert (strategy.rank, strategy.world_size, strategy.num_processes) == (1, 2, 4)
    assert not strategy.is_main
    assert strategy.gradient_average_factor == 2
    assert strategy.all_gather_objects("fourth") == ["first", "third"]
    assert strategy.agreed("fourth") == "third"


@pytest.mark.parametrize(("sequence_parallel", "activations"), [(False, (10 + 24 / 4) / 34), (True, 1 / 4)])
def test_a_plan_knows_what_a_process_holds(sequence_parallel, activations):
    config = FsdpConfig(tensor_parallel=4, sequence_parallel=sequence_parallel)
    held = FsdpStrategy(config, StrategyContext(device="cpu")).state_bytes(8, torch.float32)
    assert held == StateBytes(weights=0.5, gradients=0.5, optimizer=1.0, reference=0.5, activations=activations)


def test_layouts_are_groups_of_one_machine_the_smallest_first():
    config = FsdpConfig(tensor_parallel=4)
    assert [layout["tensor_parallel"] for layout in config.layouts(6)] == [1, 2, 2, 3, 3, 6, 6]
    assert max(layout["tensor_parallel"] for layout in config.layouts(64)) == 8
    for layout in config.layouts(8):
        FsdpConfig.model_validate(layout)


@pytest.mark.parametrize(("size", "vocabulary", "share"), [(1, 16, 1), (2, 16, 2), (2, 17, 1)])
def test_what_is_gathered_is_two_blocks_and_what_lies_outside(size, vocabulary, share):
    model = llama(4, 2, num_hidden_layers=3, vocab_size=vocabulary)
    block = sum(parameter.numel() for parameter in model.model.layers[0].parameters()) / size
    outside = 2 * model.lm_head.weight.numel() / share + model.model.norm.weight.numel()
    strategy = FsdpStrategy(FsdpConfig(tensor_parallel=size), StrategyContext(device="cpu"))
    assert strategy.gathered_bytes(model) == round(4 * (2 * block + outside + 2 * max(block, outside)))
    assert strategy.gathered_bytes(model.requires_grad_(False)) == round(4 * (2 * block + outside))


def test_sequence_parallel_needs_tensor_parallel():
    with pytest.raises(ValueError, match="set tensor_parallel above 1"):
        FsdpConfig(sequence_parallel=True)


TENSOR = StrategyCase("tensor", "fsdp", {"tensor_parallel": 2})
SEQUENCE = StrategyCase("sequence", "fsdp", {"tensor_parallel": 2, "sequence_parallel": True})


@pytest.mark.slow
def test_two_groups_of_two_train_as_one_process(tmp_path):
    seen = run_strategies([TENSOR, SEQUENCE], 4, tmp_path, load_chain=["tensor", "sequence"])
    alone = train_alone(updates=3)
    with_adapter = train_alone(updates=2, lora=True)
    for case in (TENSOR, SEQUENCE):
        for split in ("whole", "accumulated", "ragged", "two_forwards", "checkpointing"):
            got = seen[case.name][split]
            assert got["losses"] == pytest.approx(alone["losses"], abs=1e-5)
            assert got["norms"] == pytest.approx(alone["norms"], abs=1e-5)
            assert largest_difference(got["weights"], alone["weights"]) < 1e-6
        assert largest_difference(seen[case.name]["lora"]["weights"], with_adapter["weights"]) < 1e-6
        resumed = seen[case.name]["resumed"]
        assert largest_difference(resumed["saved"], resumed["loaded"]) == 0.0
        assert resumed["resumed"]["losses"] == resumed["uninterrupted"]["losses"]
    uninterrupted = seen["tensor"]["resumed"]["uninterrupted"]["losses"]
    assert seen["sequence"]["chain"]["next_losses"] == pytest.approx(uninterrupted, abs=1e-5)
