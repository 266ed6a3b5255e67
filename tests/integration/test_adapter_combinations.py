"""Adapter variants and quantized weights x strategy, transport, algorithm and resume: as in one process, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_ray import quick_workers
from run_files import metrics, samples, start
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf_core.errors import ConfigError

pytestmark = [pytest.mark.usefixtures("no_plots"), pytest.mark.timeout(660)]
REWARD = Path(__file__).with_name("digit_reward.py")
OPTIONS: dict[str, dict[str, Any]] = {
    "dora": {"lora": {"r": 4, "dora": True, "rslora": True}},
    "pissa": {"lora": {"r": 4, "init": "pissa"}},
    "nf4": {"lora": {"r": 4}, "quantize": "nf4"},
    "int8": {"lora": {"r": 4, "dora": True}, "quantize": "int8"},
}
SHARDING = ("fsdp", "low-level-zero", "gemini")
STRATEGIES = ("torch-ddp", "ddp", *SHARDING)
MEANS = ("reward/mean", "kl/mean")
LEARNT = (*MEANS, "loss/policy", "policy/grad_norm", "loss/value")


def changes(option: str, algorithm: str = "ppo", **others: Any) -> dict[str, Any]:
    """A run of two episodes of two updates."""
    return {
        "model": OPTIONS[option],
        "prompts": {"name": "sort-digits", "num_digits": 6, "size": 64, "max_prompt_tokens": 16},
        "algorithm": {"name": algorithm, **({} if algorithm == "sft" else {"kl_coef": 0.1})},
        "engine": {"max_new_tokens": 6},
        # A large eps: Adam would make whole steps out of gradients that are only rounding.
        "optimizer": {"lr": 1e-3, "eps": 1e-4},
        "rewards": None if algorithm == "sft" else [{"name": f"{REWARD}:sorted_fraction"}],
        "train": {"episodes": 2, "prompts_per_episode": 8, "samples_per_prompt": 2, "train_batch_size": 8},
        "checkpoint": {"every_episodes": 1, "keep": 3},
        **others,
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """The run of an option in one process, made once."""
    made: dict[tuple[str, str], Path] = {}
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(option: str, algorithm: str = "ppo") -> Path:
        if (option, algorithm) not in made:
            folder = tmp_path_factory.mktemp("alone") / "run"
            made[option, algorithm] = start(changes(option, algorithm), folder).run_folder
        return made[option, algorithm]

    yield run
    torch.set_num_threads(before)


def assert_follows(run: Path, reference: Path, *, rounds: bool = False) -> None:
    ours, theirs = metrics(run), metrics(reference)
    assert len(ours) == len(theirs) > 0
    rel, least = (0.2, 0.1) if rounds else (2e-4, 1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        for name in [name for name in (MEANS if rounds else LEARNT) if name in other]:
            assert mine[name] == pytest.approx(other[name], rel=rel, abs=least), (mine["step"], name)


@pytest.mark.parametrize("option", ["pissa", "nf4", "dora", "int8"])
@pytest.mark.slow_except("nf4")
def test_a_run_learns_resumes_and_saves_its_model(option: str, tmp_path: Path, alone: Callable[..., Path]) -> None:
    run = alone(option)
    lines = metrics(run)
    assert lines[0]["kl/mean"] == pytest.approx(0, abs=1e-5), "the reference is the start policy"
    assert all(line["rollout/logprob_gap_max"] < 1e-4 for line in lines)
    assert lines[-1]["policy/grad_norm"] > 0 and lines[-1]["kl/mean"] != 0
    copy = tmp_path / "run"
    start({**changes(option), "train": {**changes(option)["train"], "episodes": 1}}, copy)
    start(changes(option), copy, resume="auto")
    assert samples(copy) == samples(run)
    first, second = (load_file(folder / "model" / "model.safetensors") for folder in (run, copy))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert {tensor.dtype for tensor in first.values()} == {torch.float32}
    model, report = AutoModelForCausalLM.from_pretrained(run / "model", output_loading_info=True)
    assert not any(report.values())
    assert json.loads((run / "adapter" / "adapter_config.json").read_text())["init_lora_weights"] is True
    assert "quantization_config" not in model.config.to_dict()


@pytest.mark.parametrize(
    ("option", "strategy"),
    [
        (option, strategy)
        for option in OPTIONS
        for strategy in STRATEGIES
        if not (strategy in SHARDING and "quantize" in OPTIONS[option])
    ],
)
@pytest.mark.slow_except("nf4-torch-ddp")
def test_a_strategy_trains_it_as_one_process_does(
    option: str, strategy: str, tmp_path: Path, alone: Callable[..., Path]
) -> None:
    run = start(changes(option, strategy={"name": strategy}), tmp_path / "run").run_folder
    assert_follows(run, alone(option), rounds=strategy == "gemini")


@pytest.mark.slow
@pytest.mark.parametrize(("option", "strategy"), [("dora", "torch-ddp"), ("pissa", "fsdp"), ("nf4", "torch-ddp")])
def test_two_processes_train_it_as_one_does(
    option: str, strategy: str, tmp_path: Path, alone: Callable[..., Path]
) -> None:
    options = changes(option, strategy={"name": strategy})
    run = start(options, tmp_path / "run", num_processes=2, trust=True).run_folder
    assert_follows(run, alone(option))


@pytest.mark.parametrize("strategy", SHARDING)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_sharding_refuses_quantized_weights(kind: str, strategy: str, tmp_path: Path) -> None:
    options = changes("nf4", strategy={"name": strategy}, model={"lora": {"r": 4}, "quantize": kind})
    message = rf"strategy\.name: {strategy} cannot divide or rewrite the {kind} weights of model\.quantize"
    with pytest.raises(ConfigError, match=message):
        start(options, tmp_path / "run", dry_run=True)


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_other_algorithms_start(option: str, algorithm: str, tmp_path: Path) -> None:
    run = start(changes(option, algorithm), tmp_path / "run").run_folder
    assert all(line["policy/grad_norm"] > 0 for line in metrics(run))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_worker_source")
@pytest.mark.parametrize("sync", ["adapter", "full"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_detached_run_equals_a_local_one(option: str, sync: str, tmp_path: Path, alone: Callable[..., Path]) -> None:
    from rlhf_ray.cluster import connect
    from rlhf_ray.config import RayConfig

    transport = {"name": "ray", "max_staleness": 0, "sync": sync}
    with quick_workers(), connect(RayConfig()):
        run = start(changes(option, transport=transport), tmp_path / "run").run_folder
    assert_follows(run, alone(option))
