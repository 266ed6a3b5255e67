"""From a selected plugin to a spec: names, labels, options, isolation."""

import dataclasses

import pytest

from rlhf_core.components import RewardContext
from rlhf_core.config.sections import RewardCallOptions
from rlhf_core.plugins.selected import load
from rlhf_core.rewards.scorer import RewardScorer, make_reward_spec

SOURCE = "def brevity(rollouts, *, target_tokens: int = 10):\n    return [{} for each in rollouts]\n"
CONTEXT = RewardContext(device="cpu", seed=0)


def make(path, policy=None, **options):
    selected = load("rewards", f"{path}:brevity")
    config = selected.component.config(**options)
    return make_reward_spec(selected, config, CONTEXT, policy or RewardCallOptions(), weight=0.5)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(SOURCE.format("target_tokens - len(each.completion_ids)"))
    return path


@pytest.mark.parametrize("isolate", [False, True])
def test_a_file_reward_with_options(file, rollouts, isolate):
    spec = make(file, RewardCallOptions(isolate=isolate), target_tokens=4)
    assert (spec.name, spec.weight, spec.plugin) == ("brevity", 0.5, "my_reward.py file")
    assert (spec.function is None) == isolate
    scorer = RewardScorer([spec])
    assert scorer.score(rollouts) == [{"brevity": 3.0}] * 4
    assert scorer.weights == {"brevity": 0.5}
    scorer.close()


def test_an_installed_reward(rollouts):
    selected = load("rewards", "exact-match")
    spec = make_reward_spec(
        selected, selected.component.config(), CONTEXT, RewardCallOptions(isolate=True), name="right"
    )
    assert spec.name == "right"
    assert spec.plugin.startswith("rlhf-reward-rules ")
    answered = [dataclasses.replace(rollout, answer="2") for rollout in rollouts]
    scorer = RewardScorer([spec])
    assert [row["right"] for row in scorer.score(answered)] == [0, 0, 1, 0]
    scorer.close()
