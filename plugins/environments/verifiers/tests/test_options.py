"""Options, and selecting the environment where the library is missing."""

from importlib.util import find_spec

import pytest
from pydantic import ValidationError

from rlhf_core.config.problems import Problems
from rlhf_core.errors import PluginError
from rlhf_core.plugins import load
from rlhf_env_verifiers.config import VerifiersConfig
from rlhf_episodes.selected import resolve_environment

FUNCTION = {"task": {"rewards": {"short": {"fn": "./mine.py:short"}}}}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "env"),
        ({"env": ""}, "env"),
        ({"env": "a", "args": {"id": "b"}}, "the id is set by `env`"),
        ({"env": "a", "agent": {"client": {"base_url": "http://there"}}}, "client: it calls the policy"),
        ({"env": "a", "agent": {"model": "theirs"}}, "model: the policy is its model"),
        ({"env": "a", "agent": {"sampling": {}}}, "the section `engine`"),
        ({"env": "a", "agent": {"max_turns": 3}}, "environment.max_turns"),
        ({"env": "a", "agent": {"retries": {"max_retries": 3}}}, "environment.retries"),
        ({"env": "a", "agent": {"harness": {"env": {"LD_PRELOAD": "theirs.so"}}}}, "harness.env: set variables"),
        ({"env": "a", "num_tasks": 0}, "num_tasks"),
        ({"env": "a", "args": {"task": {"stops": [{"fn": "mine.py:été"}]}}}, "is not a function"),
    ],
)
def test_options_that_are_refused(options, said):
    with pytest.raises(ValidationError, match=said):
        VerifiersConfig(**options)


def test_texts_that_are_no_functions_are_none():
    config = VerifiersConfig(env="a", args={**FUNCTION, "prompt": "what does x.py: line 3 say?"})
    assert config.args["task"] == FUNCTION["task"]


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="the library is installed here")
def test_without_the_library_it_says_what_to_install():
    with pytest.raises(PluginError) as raised:
        load("environments", "verifiers")
    assert raised.value.hint == "pip install 'rlhf-env-verifiers[verifiers]'"


@pytest.mark.skipif(find_spec("verifiers") is None, reason="needs verifiers: make env-clients")
def test_a_function_of_a_file_is_held_against_what_may_be_run(tmp_path, monkeypatch):
    from rlhf_core.plugins.trust import FileTrust

    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").mkdir()
    for folder, refused in ((tmp_path, 0), (tmp_path / "theirs", 1)):
        problems = Problems()
        resolve_environment({"name": "verifiers", "env": "a", "args": FUNCTION}, problems, FileTrust(folder=folder))
        assert len(problems) == refused
