"""The smallest layout of training processes for the memory of one."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig

from rlhf_cli.main import main
from rlhf_core.config.resolve import resolve
from rlhf_core.entry.train import check_run
from rlhf_core.errors import UserInputError
from rlhf_plan import ProcessPlan, plan_run
from rlhf_plan.layouts import smallest_layout
from rlhf_testing.models import tiny_tokenizer
from rlhf_testing.runs import tiny_run

FSDP = {"name": "fsdp"}
GRPO = {"name": "grpo", "kl_coef": 0.0}
WIDE = {"prompts_per_episode": 64, "samples_per_prompt": 2, "train_batch_size": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder of two billion parameters, without them."""
    path = tmp_path_factory.mktemp("large")
    LlamaConfig(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=4,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(path)
    tiny_tokenizer("0123456789>,").save_pretrained(path)
    (path / "model.safetensors").write_bytes(b"")
    return str(path)


def run_of(folder, **changes):
    detached = {"name": "ray", "num_makers": 2, "num_trainers": 1}
    return tiny_run({"model": {"path": folder}, "strategy": FSDP, "transport": detached, "train": WIDE, **changes})


def planned(run, memory):
    resolved = resolve(run)
    return plan_run(resolved, check_run(resolved), memory_bytes=memory).layout


def needs(sizes):
    """What processes need, by (processes, tensor_parallel)."""

    def processes(resolved, count):
        key = count, resolved.strategy.config.tensor_parallel
        if key not in sizes:
            raise UserInputError("not so", where="strategy")
        return [ProcessPlan("process", count, {"all": sizes[key]})]

    return processes


def test_fewest_processes_first_then_the_least_communication():
    run = resolve(tiny_run({"strategy": FSDP}))
    found = smallest_layout(run, 50, needs({(1, 1): 100, (2, 1): 60, (2, 2): 40, (4, 1): 30}))
    assert (found.fits, found.num_processes, found.options) == (True, 2, {"tensor_parallel": 2})
    found = smallest_layout(run, 60, needs({(1, 1): 100, (2, 1): 60, (2, 2): 40}))
    assert (found.num_processes, found.options) == (2, {})


def test_what_the_run_file_says_is_changed_where_it_has_to_be():
    run = resolve(tiny_run({"strategy": {**FSDP, "tensor_parallel": 2, "sequence_parallel": True}}))
    found = smallest_layout(run, 50, needs({(1, 1): 50}))
    assert found.options == {"tensor_parallel": 1, "sequence_parallel": False}


def test_the_leanest_is_told_where_none_fits():
    run = resolve(tiny_run({"strategy": FSDP}))
    found = smallest_layout(run, 10, needs({(1, 1): 100, (2, 1): 60, (4, 1): 70}))
    assert (found.fits, found.num_processes, found.largest.total_bytes) == (False, 2, 60)
    with pytest.raises(UserInputError, match="not so"):
        smallest_layout(run, 10, needs({}))


def test_no_rank_is_without_rows():
    """Four prompts an episode: more than four ranks would have nothing to do."""
    seen = []

    def processes(resolved, count):
        seen.append(count // resolved.strategy.config.tensor_parallel)
        return [ProcessPlan("process", count, {"all": 2})]

    assert not smallest_layout(resolve(tiny_run({"strategy": FSDP})), 1, processes).fits
    assert max(seen) == 4


def test_a_model_of_two_billion_parameters(folder):
    num_parameters = 0
    for memory, at_least in ((40_000_000_000, 1), (12_000_000_000, 3)):
        resolved = resolve(run_of(folder, algorithm=GRPO))
        found = plan_run(resolved, check_run(resolved), memory_bytes=memory)
        num_parameters, layout = found.num_parameters, found.layout
        trainer, maker = layout.processes
        assert layout.fits and trainer.total_bytes <= memory
        assert layout.num_processes == trainer.count >= at_least
        assert trainer.bytes_by_part["policy optimizer"] == -(-8 * num_parameters // trainer.count)
        assert maker.count == 2
    none = planned(run_of(folder, algorithm=GRPO), 4 * num_parameters)
    assert not none.fits
    assert none.largest.kind == "maker"  # which has the whole policy


def test_a_plan_refuses_what_the_strategy_cannot_train(folder):
    for size, said in ((3, "cannot share 32 attention heads"), (8, "4 key-value heads")):
        resolved = resolve(run_of(folder, strategy={**FSDP, "tensor_parallel": size}))
        with pytest.raises(UserInputError, match=said):
            plan_run(resolved, check_run(resolved))


def test_what_to_type(folder, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(run_of(folder, algorithm=GRPO)))

    def says(*flags, code=0):
        with pytest.raises(SystemExit) as ended:
            main(["plan", str(path), *flags])
        assert ended.value.code == code
        said = capsys.readouterr()
        return " ".join((said.err if code else said.out).split())

    local = ("--transport", "local", "--set", "transport={name: local}")
    assert "the smallest layout for 14.00 GB per process: 4 training processes" in says("--memory", "14GB")
    assert "--set transport.num_trainers=" in says("--memory", "14GB")
    said = says("--memory", "60GB", *local)
    assert "the smallest layout for 60.00 GB per process: 1 training process, at most" in said
    assert "--num-processes 1" in said
    assert "policy copy of the engine separate makers" in says("--memory", "9GB", *local)
    assert "--strategy fsdp" in says("--memory", "30GB", "--strategy", "single", *local)
    assert "'plenty' is not a size above 0" in says("--memory", "plenty", code=2)
    assert json.loads(says("--memory", "40GB", "--json"))["layout"]["memory_bytes"] == 40_000_000_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_plan_for_a_gpu_on_a_machine_without_one(folder, tmp_path, capsys):
    """Its memory is told, of a GPU: neither this process's libraries, nor passes as small as a CPU's."""
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(run_of(folder, algorithm=GRPO, train={**WIDE, "train_batch_size": 128})))
    gpu = ("--set", "model.device=cuda", "--set", "engine.max_new_tokens=1000", "--memory", "40GB")
    with pytest.raises(SystemExit):
        main(["plan", str(path), "--set", "model.device=auto"])
    assert "on cpu (for GPUs: --set model.device=cuda)" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(path), *gpu, "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    for process in [*found["processes"], *found["layout"]["processes"]]:
        assert "interpreter and libraries" not in process["bytes_by_part"]
    trainer, _ = found["processes"]
    assert trainer["bytes_by_part"]["activations"] > 16_384 * 3 * 32_000 * 4, "logits of a pass on a GPU"
    assert found["device"] == "cuda"
    with pytest.raises(SystemExit):
        main(["plan", str(path), *gpu, "--strategy", "low-level-zero"])
    out = capsys.readouterr().out
    assert "on cuda\n" in out and "libraries" not in out
