"""Strategy x algorithm x LoRA x transport x resume x engine: three runs in `make test`, the others in `make soak`.

What does not go together is refused by name: `test_refused_combinations.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from generation_server import generation_server
from pairwise import Pair, pairs_of
from quick_ranks import quick_vllm
from quick_ray import quick_workers
from run_files import metrics, samples, start
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import rlhf_models

pytestmark = [pytest.mark.usefixtures("no_plots"), pytest.mark.timeout(660)]
REWARD = Path(__file__).with_name("digit_reward.py")
STAND_IN = Path(__file__).with_name("stand_in")
"""Where a module `vllm` lies: the parts that the engine needs, over transformers."""
SERVER = "RLHF_TEST_GENERATION_SERVER"
"""Environment variable with the address of the server of the engine `http`."""
MEANS = ("loss/value", "reward/mean", "kl/mean")
"""Metrics that a few other answers among many move little."""
LEARNT = (*MEANS, "loss/policy", "policy/grad_norm")
OF_THE_PLACE = ("transport/", "sync/")
"""Metrics that say where and how fast, beside the times: not what was learnt."""


class Combination(NamedTuple):
    """One value of every column."""

    strategy: str
    algorithm: str
    lora: str
    transport: str
    resume: str
    engine: str

    def __str__(self) -> str:
        return "-".join(value for value in self if value not in ("no", "hf"))


COLUMNS = {
    "strategy": ("single", "torch-ddp", "ddp", "fsdp", "low-level-zero", "gemini"),
    "algorithm": ("ppo", "grpo", "sft"),
    "lora": ("no", "lora"),
    "transport": ("local", "ray"),
    "resume": ("no", "resume"),
    "engine": ("hf", "vllm", "http"),
}
EVERY = [Combination(*values) for values in itertools.product(*COLUMNS.values())]
PAIRWISE = [
    Combination("single", "ppo", "no", "local", "resume", "vllm"),
    Combination("single", "grpo", "lora", "local", "no", "http"),
    Combination("single", "sft", "no", "ray", "no", "hf"),
    Combination("torch-ddp", "ppo", "lora", "local", "resume", "vllm"),
    Combination("torch-ddp", "grpo", "no", "local", "no", "http"),
    Combination("torch-ddp", "sft", "no", "ray", "no", "hf"),
    Combination("ddp", "ppo", "lora", "ray", "resume", "http"),
    Combination("ddp", "grpo", "no", "local", "no", "hf"),
    Combination("ddp", "sft", "lora", "local", "no", "vllm"),
    Combination("fsdp", "ppo", "no", "local", "no", "http"),
    Combination("fsdp", "grpo", "lora", "ray", "no", "vllm"),
    Combination("fsdp", "sft", "no", "local", "resume", "hf"),
    Combination("low-level-zero", "ppo", "lora", "local", "no", "http"),
    Combination("low-level-zero", "grpo", "no", "ray", "no", "hf"),
    Combination("low-level-zero", "sft", "lora", "local", "resume", "vllm"),
    Combination("gemini", "ppo", "lora", "ray", "no", "hf"),
    Combination("gemini", "grpo", "lora", "local", "resume", "vllm"),
    Combination("gemini", "sft", "no", "local", "no", "http"),
]
QUICK = [
    Combination("ddp", "sft", "lora", "local", "no", "hf"),
    Combination("fsdp", "grpo", "lora", "local", "no", "hf"),
    Combination("low-level-zero", "sft", "lora", "local", "resume", "hf"),
]
"""Of `make test`. `torch-ddp` is `ddp` under another name, and `gemini` is in test_strategies_agree.py."""
# A resumed run is compared with one that was not stopped, so it takes in the combination without a resume.
# The engine http is that of other processes, so the pairs are enough.
PRODUCT = [each for each in EVERY if each.resume == "resume" and each.engine != "http"]
SLOW = [each for each in dict.fromkeys([*PAIRWISE, *PRODUCT]) if each not in QUICK]


def _pairs(combination: Combination) -> set[Pair]:
    return set(pairs_of(combination._asdict()))


def test_every_pair_of_values_is_tried() -> None:
    assert tuple(COLUMNS) == Combination._fields
    assert set().union(*map(_pairs, PAIRWISE)) == set().union(*map(_pairs, EVERY))
    assert {each.strategy for each in QUICK} == {"ddp", "fsdp", "low-level-zero"}


@pytest.fixture(scope="module")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs' model with other weights, to start a server with."""
    folder = tmp_path_factory.mktemp("served")
    builtin = Path(rlhf_models.__file__).with_name("builtin_models") / "tiny-digits"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(builtin)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(builtin).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[pytest.MonkeyPatch]:
    """The processes of all runs, and this one, compute on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield patch
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def generation(one_thread: pytest.MonkeyPatch, served_model: Path) -> Iterator[None]:
    """A server for the engine `http`, and a module `vllm` that all processes find."""
    one_thread.setenv("PYTHONPATH", str(STAND_IN), prepend=os.pathsep)
    one_thread.syspath_prepend(str(STAND_IN))
    with generation_server("vllm", served_model) as server, quick_vllm():
        one_thread.setenv(SERVER, server.url)
        yield


@pytest.fixture(scope="module")
def local_ray(ray_worker_source: None, generation: None) -> Iterator[None]:
    """One Ray for all runs of this module."""
    from rlhf_ray.cluster import connect
    from rlhf_ray.config import RayConfig

    with quick_workers(), connect(RayConfig()):
        yield


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Combination], Path]:
    """The run of an algorithm, adapter and engine in one process without anything else; each is made once."""
    made: dict[Combination, Path] = {}

    def run(combination: Combination) -> Path:
        plain = combination._replace(strategy="single", transport="local", resume="no")
        if plain not in made:
            made[plain] = start(_changes(plain), tmp_path_factory.mktemp("alone") / "run").run_folder
        return made[plain]

    return run


def _changes(combination: Combination) -> dict[str, Any]:
    """A run of two episodes of two updates."""
    changes: dict[str, Any] = {
        "model": {"lora": {"r": 4} if combination.lora == "lora" else None},
        "prompts": {"name": "sort-digits", "num_digits": 6, "size": 64, "max_prompt_tokens": 16},
        "strategy": {"name": combination.strategy},
        "algorithm": {"name": combination.algorithm},
        "engine": {"name": combination.engine, "max_new_tokens": 6},
        # A large eps: Adam would make whole steps out of gradients that are but rounding.
        "optimizer": {"lr": 1e-3, "eps": 1e-4},
        "rewards": None if combination.algorithm == "sft" else [{"name": f"{REWARD}:sorted_fraction"}],
        "train": {"episodes": 2, "prompts_per_episode": 8, "samples_per_prompt": 3, "train_batch_size": 12},
        "checkpoint": {"every_episodes": 1, "keep": 3},
    }
    if combination.engine == "http":
        changes["engine"]["url"] = os.environ[SERVER]
    if combination.algorithm == "sft":
        changes["train"] |= {"samples_per_prompt": 1, "train_batch_size": 4}
    if combination.transport == "ray":
        changes["transport"] = {"name": "ray", "max_staleness": 0}
    return changes


@pytest.mark.parametrize(
    "combination",
    [
        *(pytest.param(each, id=str(each)) for each in QUICK),
        *(pytest.param(each, id=str(each), marks=pytest.mark.slow) for each in SLOW),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_it_trains_as_one_process_does(
    combination: Combination, tmp_path: Path, alone: Callable[[Combination], Path], request: pytest.FixtureRequest
) -> None:
    if combination.engine != "hf":
        request.getfixturevalue("generation")
    if combination.transport == "ray":
        request.getfixturevalue("local_ray")
    run = start(_changes(combination), tmp_path / "run").run_folder
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    _assert_follows(run, alone(combination), combination)
    _assert_model_says_its_type(run / "model")
    if combination.resume == "resume":
        _assert_resume_repeats(combination, run, tmp_path / "resumed")


def _assert_follows(run: Path, reference: Path, combination: Combination) -> None:
    """Line by line. In 16 bits (gemini) some sampled tokens are others, and so is what is learnt from them."""
    ours, theirs = metrics(run), metrics(reference)
    assert len(ours) == len(theirs) > 0
    rounds = combination.strategy == "gemini"
    names = MEANS if rounds and combination.algorithm != "sft" else LEARNT
    rel, least = (0.1, 0.1) if rounds else (1e-4, 1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["policy/grad_norm"] > 0
        for name in [name for name in names if name in other]:
            assert mine[name] == pytest.approx(other[name], rel=rel, abs=least), (mine["step"], name)


def _assert_model_says_its_type(folder: Path) -> None:
    """Reading the folder as its config says changes no digit of it."""
    file = load_file(folder / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert {str(tensor.dtype) for tensor in file.values()} == {"torch.float32"}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in file.items())


def _assert_resume_repeats(combination: Combination, run: Path, copy: Path) -> None:
    """From the checkpoint behind the first episode, in a copy of the run's folder."""
    shutil.copytree(run, copy)
    start(_changes(combination), copy, resume=str(copy / "checkpoints" / "step-2"))
    for mine, other in zip(metrics(copy), metrics(run), strict=True):
        learnt = {name: value for name, value in other.items() if not name.startswith(OF_THE_PLACE)}
        assert {name: mine[name] for name in learnt} == pytest.approx(learnt, rel=1e-6, abs=1e-9)
    if combination.algorithm != "sft":
        assert samples(copy) == samples(run)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (copy, run))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
