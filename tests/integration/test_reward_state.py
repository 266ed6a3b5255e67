"""A reward that keeps state has it again after a resume."""

import pytest
from run_files import start

from rlhf_core.errors import RlhfError

PLUGIN = '''
from pydantic import Field
from rlhf_core import Component, Section

class Config(Section):
    step: float = Field(1.0, description="What each call adds.")

def build(config, context):
    return Rising(config.step)

class Rising:
    """Each call is rewarded more than the one before it."""

    def __init__(self, step):
        self.step, self.calls = step, 0

    def __call__(self, rollouts):
        self.calls += 1
        return [self.calls * self.step] * len(rollouts)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]

rising = Component("Rises.", Config, "acme_rising:build")
'''
BASE = {
    "train": {"episodes": 4, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 8},
    "checkpoint": {"every_episodes": 1},
    "rewards": [{"name": "acme-rising", "step": 0.5}],
}


class Fail:
    def rlhf_episode_start(self, episode):
        if episode == 2:
            raise RlhfError("stopped by the test")


@pytest.mark.usefixtures("no_plots")
def test_a_reward_goes_on_where_it_was(tmp_path, install):
    install("acme", {"rlhf.rewards": {"acme-rising": "acme_rising:rising"}}, {"acme_rising": PLUGIN})
    straight = start(BASE, tmp_path / "straight")
    assert [line["reward/acme-rising"] for line in straight.metrics] == [0.5, 1.0, 1.5, 2.0]
    with pytest.raises(RlhfError, match="stopped by the test"):
        start(BASE, tmp_path / "run", hooks=[Fail()])
    resumed = start(BASE, tmp_path / "run", resume="auto")
    assert [line["reward/acme-rising"] for line in resumed.metrics] == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.usefixtures("no_plots")
def test_a_state_that_cannot_be_given_back_names_the_reward(tmp_path, install):
    broken = PLUGIN.replace('self.calls = state["calls"]', "raise ValueError('what is that?')")
    install(
        "acme",
        {"rlhf.rewards": {"acme-rising": "acme_broken:rising"}},
        {"acme_broken": broken.replace("acme_rising:build", "acme_broken:build")},
    )
    with pytest.raises(RlhfError, match="stopped by the test"):
        start(BASE, tmp_path / "run", hooks=[Fail()])
    with pytest.raises(RlhfError, match=r"acme-rising: load_state_dict raised ValueError: what is that\?"):
        start(BASE, tmp_path / "run", resume="auto")
