"""The contracts fail for plugins that would break a run, and say what is wrong; pytest stays light."""

from __future__ import annotations

import re
import sys

import pytest
from plugin_tests import run_pytest

PLUGINS = """
import random
from dataclasses import replace

import torch
from pydantic import BaseModel
from rlhf_core import Component
from rlhf_core.algorithm import LossOutput, LossTerm, RolloutAlgorithm
from rlhf_core.config.sections import EngineConfig, Section
from rlhf_forward.forward import policy_forward
from rlhf_forward.masking import masked_mean, masked_sum
from rlhf_testing.engine import FakeEngine

def moody(rollouts) -> list[float]:
    "Draws lots."
    return [random.random() for _ in rollouts]

def ranked(rollouts) -> list[float]:
    "The place in the call."
    return [float(place) for place in range(len(rollouts))]

def empty(rollouts) -> list[float]:
    "Divides by the length."
    return [1 / len(rollout.completion) for rollout in rollouts]

def greedy(rollouts) -> list[float]:
    "Changes what it is given."
    for rollout in rollouts:
        rollout.metadata["seen"] = True
    return [0.0] * len(rollouts)

class Loose(BaseModel):
    size: int = 1

class Nothing(Section):
    pass

class Options(EngineConfig):
    pass

loose = Component("", Loose, "bad_plugins:build_loose")
def build_loose(config, context):
    return lambda rollouts: [0.0] * len(rollouts)

class Reinforce(RolloutAlgorithm):
    sign = -1.0
    roles = frozenset({"policy"})
    terms = {"policy": LossTerm("policy")}
    def advantages(self, episode):
        advantages = (episode.scores - episode.scores.mean())[:, None] * episode.action_mask
        return replace(episode, advantages=advantages)
    def counts(self, batch):
        return {"policy": float(batch.action_mask.sum())}
    def total(self, values, mask):
        return masked_sum(values, mask)
    def loss(self, models, batch):
        log_probs = policy_forward(models["policy"], batch, 1.0).log_probs
        return LossOutput({"policy": self.total(self.sign * batch.advantages * log_probs, batch.action_mask)})

class WrongSign(Reinforce):
    sign = 1.0

class MeanInside(Reinforce):
    def total(self, values, mask):
        return masked_mean(values, mask)

class MeanOfItsRows(Reinforce):
    needs_all_rows = False

rows = Component("A mean over the rows of a rank.", Nothing, "bad_plugins:build_rows")
def build_rows(config, context):
    return MeanOfItsRows()
sign = Component("The wrong sign.", Nothing, "bad_plugins:build_sign")
def build_sign(config, context):
    return WrongSign()
mean = Component("A mean in the loss.", Nothing, "bad_plugins:build_mean")
def build_mean(config, context):
    return MeanInside()

made_up = Component("Answers without a model.", Options, "bad_plugins:build_engine")
def build_engine(config, context):
    return FakeEngine()
"""
TESTS = """
from rlhf_testing.contracts import AlgorithmContract, EngineContract, RewardContract

class TestMoody(RewardContract):
    plugin = "bad-moody"

class TestRanked(RewardContract):
    plugin = "bad-ranked"

class TestEmpty(RewardContract):
    plugin = "bad-empty"

class TestGreedy(RewardContract):
    plugin = "bad-greedy"

class TestLoose(RewardContract):
    plugin = "bad-loose"

class TestSign(AlgorithmContract):
    plugin = "bad-sign"

class TestMean(AlgorithmContract):
    plugin = "bad-mean"

class TestRows(AlgorithmContract):
    plugin = "bad-rows"

class TestEngine(EngineContract):
    plugin = "bad-engine"
"""
REWARDS = ("moody", "ranked", "empty", "greedy", "loose")


@pytest.fixture
def report(install, tmp_path) -> str:
    """What pytest says of the bad plugins."""
    targets = {
        "rlhf.rewards": {f"bad-{name}": f"bad_plugins:{name}" for name in REWARDS},
        "rlhf.algorithms": {f"bad-{name}": f"bad_plugins:{name}" for name in ("sign", "mean", "rows")},
        "rlhf.engines": {"bad-engine": "bad_plugins:made_up"},
    }
    install("bad-plugins", targets, {"bad_plugins": PLUGINS})
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "test_bad.py").write_text(TESTS)
    return run_pytest(folder, sys.path[0], select="not process_of and (Sign or not light)")


@pytest.mark.slow
def test_faults_are_found_and_named(report):
    outcomes = dict(re.findall(r"^(?:FAILED|PASSED|ERROR) \S+::(Test\w+::\S+)(.*)$", report, flags=re.MULTILINE))
    failed = dict(re.findall(r"^FAILED \S+::(Test\w+::\w+)\S*(.*)$", report, flags=re.MULTILINE))
    assert len(outcomes) > len(failed)
    expected = {
        "TestMoody::test_the_same_answer_gets_the_same_score",
        "TestRanked::test_each_answer_alone",
        "TestEmpty::test_one_finite_number_for_every_answer",
        "TestGreedy::test_rollouts_are_left_as_they_are",
        "TestLoose::test_unknown_options_are_refused",
        "TestLoose::test_summary_is_one_line",
        "TestLoose::test_options_are_described",
        "TestSign::test_better_answers_become_likelier",
        "TestSign::test_importing_it_is_light",
        "TestMean::test_micro_batches_do_not_change_the_gradient",
        "TestRows::test_ranks_compute_what_one_computes",
        "TestEngine::test_log_probs_are_those_sampled_from",
        "TestEngine::test_greedy_takes_the_likeliest",
    }
    assert expected <= set(failed), report
    for hint in (
        "set deterministic = False",
        "set looks_at_batch = True",
        "ZeroDivisionError",
        "modify a copy instead",
        "a misspelled option is not detected",
        "Is the sign wrong?",
        "`loss` must return sums",
        "is each sum over rows reduced over ranks?",
        "log-probs differ from a forward pass",
    ):
        assert hint in report, f"{hint}\n{report}"
    fine = {name for name in ("TestSign::test_micro_batches_do_not_change_the_gradient",) if name in failed}
    assert not fine, "what is right passes"


LIGHT = """
import sys
import pytest

def test_nothing_heavy_is_loaded(rlhf_device):
    assert rlhf_device == "cpu"
    assert not {"torch", "transformers", "numpy", "ray"} & set(sys.modules)

@pytest.mark.gpu
def test_the_marker_is_known():
    pass
"""


@pytest.mark.slow
def test_a_project_that_tests_no_plugin_pays_nothing(tmp_path):
    (tmp_path / "test_light.py").write_text(LIGHT)
    assert "PASSED test_light.py::test_nothing_heavy_is_loaded" in run_pytest(tmp_path)
