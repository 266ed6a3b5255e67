"""What a plugin's `build` is given is the same in a run, in its contract suite and in `rlhf plugins check`.

One spy for each kind writes down what it was given and builds what a plugin of this repository builds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import PATIENCE_SECONDS

from rlhf_core.entry.train import train
from rlhf_core.plugins.discovery import discover
from rlhf_testing.probe import probe
from rlhf_testing.runs import tiny_run

SPIES = """
import json, os
from dataclasses import fields
from functools import partial
from importlib import import_module

from rlhf_core import Component
from rlhf_core.components import *
from rlhf_data.config import SortDigitsConfig
from rlhf_hf.config import HfEngineConfig
from rlhf_ppo.config import PPOConfig
from rlhf_torch.config import SingleConfig
from rlhf_core.config.sections import Section

class Nothing(Section):
    pass

def note(kind, context):
    seen = {}
    for field in fields(context):
        value = getattr(context, field.name)
        if isinstance(value, partial):
            value = value.func
        seen[field.name] = str(value) if field.name == "device" else type(value).__name__
    with open(os.environ["SPY_LOG"], "a") as log:
        log.write(json.dumps([kind, seen]) + "\\n")

def spy(kind, target):
    module, attribute = target.split(":")
    def build(config, context):
        note(kind, context)
        return getattr(import_module(module), attribute)(config, context)
    return build

build_algorithm = spy("algorithms", "rlhf_ppo.algorithm:build")
build_strategy = spy("strategies", "rlhf_torch.single:SingleStrategy")
build_engine = spy("engines", "rlhf_hf.engine:build")
build_prompts = spy("prompts", "rlhf_data.sort_digits:build")

def build_reward(config, context):
    note("rewards", context)
    return lambda rollouts: [float(len(rollout.completion)) for rollout in rollouts]

algorithm = Component("Spies.", PPOConfig, "spy_plugins:build_algorithm")
strategy = Component("Spies.", SingleConfig, "spy_plugins:build_strategy")
engine = Component("Spies.", HfEngineConfig, "spy_plugins:build_engine")
prompts = Component("Spies.", SortDigitsConfig, "spy_plugins:build_prompts")
reward = Component("Spies.", Nothing, "spy_plugins:build_reward")
"""
SUITES = """
from rlhf_testing.contracts import (
    AlgorithmContract, EngineContract, PromptsContract, RewardContract, StrategyContract,
)

class TestAlgorithm(AlgorithmContract):
    plugin = "spy"

class TestEngine(EngineContract):
    plugin = "spy"

class TestPrompts(PromptsContract):
    plugin = "spy"

class TestReward(RewardContract):
    plugin = "spy"

class TestStrategy(StrategyContract):
    plugin = "spy"
"""
ONE_OF_EACH = (
    "test_terms_train_its_roles or test_completions_are_well_formed or test_one_finite_number_for_every_answer"
    " or test_a_record_stays_the_same or test_it_resumes_exactly"
)
KINDS = {"algorithms": "algorithm", "strategies": "strategy", "engines": "engine", "prompts": "prompts"}


@pytest.fixture
def spies(install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file they write into."""
    targets = {f"rlhf.{kind}": {"spy": f"spy_plugins:{name}"} for kind, name in {**KINDS, "rewards": "reward"}.items()}
    install("spy-plugins", targets, {"spy_plugins": SPIES})
    monkeypatch.setenv("SPY_LOG", str(tmp_path / "seen.jsonl"))
    return tmp_path / "seen.jsonl"


def noted(log: Path) -> dict[str, dict[str, str]]:
    """Kind -> what it was given, which is the same each time; the file is emptied."""
    seen: dict[str, dict[str, str]] = {}
    for kind, context in map(json.loads, log.read_text().splitlines()):
        assert seen.setdefault(kind, context) == context
    log.unlink()
    return seen


def in_a_run(folder: Path, log: Path) -> dict[str, dict[str, str]]:
    sections = {name: {"name": "spy"} for name in ("algorithm", "strategy")}
    run = tiny_run({**sections, "rewards": [{"name": "spy"}], "model": {"device": "auto"}, "train": {"episodes": 1}})
    run["engine"]["name"] = run["prompts"]["name"] = "spy"
    train(run, output=folder / "run")
    return noted(log)


def in_the_suites(folder: Path, log: Path) -> dict[str, dict[str, str]]:
    project = folder / "project"
    project.mkdir()
    (project / "test_spies.py").write_text(SUITES)
    environment = {**os.environ, "PYTHONPATH": sys.path[0], "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", ONE_OF_EACH, str(project)]
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return noted(log)


def in_a_check(log: Path) -> dict[str, dict[str, str]]:
    refs = [discover(kind)["spy"] for kind in (*KINDS, "rewards")]
    assert [verdict.status for verdict in probe(refs, whole=True)] == ["ok"] * len(refs)
    return noted(log)


@pytest.mark.slow
def test_a_plugin_is_given_the_same_wherever_it_is_built(spies: Path, tmp_path: Path) -> None:
    run = in_a_run(tmp_path, spies)
    assert set(run) == {*KINDS, "rewards"}
    assert run["rewards"].pop("folder") == "PosixPath"  # where a run keeps a reward's files
    for kind in ("rewards", "strategies", "engines"):
        assert run[kind]["device"] not in ("auto", "cuda"), f"{kind}: a device is resolved before a plugin sees it"
    for elsewhere in (in_a_check(spies), in_the_suites(tmp_path, spies)):
        assert elsewhere["rewards"].pop("folder") == "NoneType"
        assert elsewhere == run
