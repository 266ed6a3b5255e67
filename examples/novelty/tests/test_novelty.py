"""The contracts of the algorithm and the hook, and some numbers of each part."""

from types import SimpleNamespace

import pytest
import torch
from rlhf_example_novelty import optimizer, schedule
from rlhf_example_novelty.algorithm import Novel
from rlhf_example_novelty.config import NovelConfig, RestartsConfig, SignumConfig

from rlhf_core.components import ScheduleContext
from rlhf_testing.contracts import AlgorithmContract, HooksContract

WITNESS = {"path": "builtin:tiny-digits"}


class TestNovel(AlgorithmContract):
    plugin = "novel"
    options = {"witness": WITNESS, "goal": 2.0}


class TestNoveltyGoal(HooksContract):
    plugin = "novelty-goal"
    options = {"goal": 2.0, "patience": 1}


def test_new_tokens_weigh_more_up_to_the_goal():
    config = NovelConfig(witness=WITNESS, goal=2.0, bonus=0.5)
    algorithm = Novel(config, SimpleNamespace(sampling=SimpleNamespace(temperature=1.0)))
    assert algorithm.weights(torch.tensor([0.0, 1.0, 2.0, 9.0])).tolist() == [1.0, 1.25, 1.5, 1.5]


def test_a_step_is_the_sign_of_the_mean_gradient():
    weight = torch.nn.Parameter(torch.zeros(2))
    context = SimpleNamespace(parameters={"weight": weight}, lr=0.5)
    made = optimizer.build(SignumConfig(momentum=0.5), context)
    for gradient in ([3.0, -1.0], [-1.0, -1.0]):
        weight.grad = torch.tensor(gradient)
        made.step()
    assert weight.tolist() == [-1.0, 1.0]


def test_the_rate_restarts():
    factor = schedule.build(RestartsConfig(cycles=2), ScheduleContext(warmup_updates=0, total_updates=4))
    assert [factor(update) for update in range(4)] == pytest.approx([1.0, 0.5, 1.0, 0.5])
