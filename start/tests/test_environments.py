"""`rlhf train --environment NAME` without a run file: the environment's own quickstart, or what to write."""

import pytest
from click.testing import CliRunner

from rlhf_cli.main import cli
from rlhf_cli.quickstart import trainer_of
from rlhf_cli.run_arguments import RunArguments
from rlhf_core.components import Component
from rlhf_core.config.resolve import resolve
from rlhf_core.config.sections import Section
from rlhf_core.errors import ConfigError, PluginError
from rlhf_core.plugins.selected import SelectedPlugin, load
from rlhf_start.quickstart import environment_runs, warm_start


def test_an_environment_that_brings_a_quickstart_runs_it():
    first, second = environment_runs(load("environments", "guess-number"))
    assert (first["algorithm"]["name"], second["environment"]["name"]) == ("sft", "guess-number")
    assert (resolve(first).run.train.episodes, resolve(second).run.train.samples_per_episode) == (60, 512)
    request = RunArguments(environment="Guess_Number", overrides=("environment.shuffle_observations=true",))
    mapping, dropped = request.mapping()
    assert (mapping["environment"]["shuffle_observations"], dropped) == (True, [])
    assert trainer_of(mapping, request.resumed) is not None
    assert warm_start(mapping) == first


def test_a_model_of_ones_own_needs_no_warm_start_there_either():
    request = RunArguments(environment="guess-number", model="my-model")
    assert trainer_of(request.mapping()[0], request.resumed) is None


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "ppo"])
def test_it_goes_with_other_algorithms(algorithm):
    mapping, _ = RunArguments(environment="guess-number", algorithm=algorithm).mapping()
    assert resolve(mapping).algorithm.name == algorithm


def test_one_that_brings_none_says_what_to_write():
    error = CliRunner().invoke(cli, ["train", "--environment", "conversation"]).exception
    assert isinstance(error, ConfigError) and error.exit_code == 2
    assert 'environment "conversation"' in error.message and "does not have a quickstart" in error.message
    assert error.hint is not None and "model: {path: …}" in error.hint


def test_a_quickstart_that_is_not_there_is_its_plugins_fault():
    component = Component(summary="s", config=Section, build="m:b", quickstart="rlhf_core:nowhere")
    with pytest.raises(PluginError, match="quickstart rlhf_core:nowhere cannot be read"):
        environment_runs(SelectedPlugin("environments", "lost", component, "lost-dist", "1.0"))


def test_an_environment_without_a_name_is_told_by_the_check_of_the_run():
    error = CliRunner().invoke(cli, ["train", "--set", "environment.max_turns=3", "--dry-run"]).exception
    assert isinstance(error, ConfigError)
    assert "environment.name" in str(error)
