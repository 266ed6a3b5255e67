"""The run files that ship with the quickstart."""

import pytest
from click.testing import CliRunner

from rlhf_cli.main import cli
from rlhf_cli.quickstart import trainer_of
from rlhf_cli.run_arguments import RunArguments
from rlhf_core.config.load import load_run
from rlhf_start.quickstart import algorithm_stages, expected_minutes, stage


def test_the_quickstart_files_hold_what_the_design_says():
    warm_start, ppo = stage("warm-start"), stage("ppo")
    assert (warm_start["algorithm"]["name"], ppo["algorithm"]["name"]) == ("sft", "ppo")
    assert warm_start["model"]["path"] == ppo["model"]["path"] == "builtin:tiny-digits"
    assert (warm_start["strategy"]["name"], warm_start["transport"]["name"]) == ("single", "local")
    train = warm_start["train"]
    assert train["episodes"] * train["prompts_per_episode"] // train["train_batch_size"] == 50
    assert ppo["optimizer"]["warmup_episodes"] == 10
    assert load_run(ppo) == ppo


def test_the_expected_duration_is_that_of_ppo_and_grows_with_the_samples():
    def minutes(**arguments):
        return expected_minutes(RunArguments(**arguments).mapping()[0])

    shipped = minutes()
    assert minutes(overrides=("train.episodes=1",)) == 1 <= shipped <= 3
    assert minutes(overrides=("train.episodes=600",)) > 5 * shipped
    assert minutes(overrides=("train.episodes=many",)) is None
    assert minutes(algorithm="grpo") is minutes(transport="ray") is minutes(model="mine") is None
    assert minutes(environment="guess-number") is None


@pytest.mark.parametrize(
    "algorithm", ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rloo", "reinforce++"))]
)
def test_the_quickstart_runs_with_an_algorithm_that_has_no_critic(algorithm):
    result = CliRunner().invoke(cli, ["train", "--algorithm", algorithm, "--dry-run"])
    assert result.exit_code == 0, result.output
    mapping, _ = RunArguments(algorithm=algorithm).mapping()
    assert "critic_lr" not in mapping["optimizer"] and mapping["train"]["samples_per_prompt"] > 1


@pytest.mark.parametrize(
    "algorithm",
    [
        "sft",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "kto", "orpo", "simpo", "reward-model")),
    ],
)
def test_the_quickstart_runs_with_an_algorithm_that_learns_from_a_dataset(algorithm):
    result = CliRunner().invoke(cli, ["train", "--algorithm", algorithm, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "dropped" not in result.output


def test_the_quickstart_of_distillation_makes_a_teacher_unless_there_is_one():
    request = RunArguments(algorithm="distill")
    mapping, dropped = request.mapping()
    assert trainer_of(mapping, request.resumed) is not None and not dropped
    stages = algorithm_stages(mapping)
    assert {name: stage["algorithm"]["name"] for name, stage in stages.items()} == {"teacher": "sft"}
    own, _ = RunArguments(algorithm="distill", overrides=("algorithm.teacher.path=./mine",)).mapping()
    assert algorithm_stages(own) == {}
    assert algorithm_stages(RunArguments(algorithm="ppo").mapping()[0]) == {}
