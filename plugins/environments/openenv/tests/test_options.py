"""Options, what is read of a reply, and selecting the environment where the library is missing."""

from importlib.util import find_spec

import pytest
from pydantic import ValidationError

from rlhf_core.errors import PluginError
from rlhf_core.plugins import load
from rlhf_openenv.config import OpenEnvConfig
from rlhf_openenv.text import NoAction, action_of, text_of


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "base_url"),
        ({"base_url": "localhost:8000"}, "should be http"),
        ({"base_url": "file:///etc/passwd"}, "should be http"),
        ({"base_url": "http://user:word@there"}, "contains credentials"),
        ({"base_url": "http://there/?a=b"}, "not contain \\?"),
        ({"base_url": "http://there:port"}, "not an address"),
        ({"base_url": "http://a", "reset": {"seed": 3}}, "the seed is the task's"),
        ({"base_url": "http://a", "action_field": ""}, "action_field"),
    ],
)
def test_options_that_are_refused(options, said):
    with pytest.raises(ValidationError, match=said):
        OpenEnvConfig(**options)


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ('{"number": 3}', {"number": 3}),
        ('I say\n```json\n{"number": 3}\n``` now {"number": 4}', {"number": 3}),
        ('<think>{"number": 1}</think> {"number": 2}', {"number": 2}),
    ],
)
def test_an_action_as_json(reply, action):
    assert action_of(reply, None) == action


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("three", "no JSON object"),
        ('{"number": ', "not valid JSON"),
        ('{"number": NaN}', "NaN"),
        ('{"a": ' * 50, "nested"),
        ('{"word": "\\ud800"}', "surrogate"),
    ],
)
def test_a_reply_without_an_action(reply, said):
    with pytest.raises(NoAction, match=said):
        action_of(reply, None)


def test_an_action_as_text():
    assert action_of("<think>hm</think> go north\n", "command") == {"command": "go north"}


def test_an_observation_as_text():
    assert text_of({"hint": "é", "left": 2}, None) == '{"hint": "é", "left": 2}'
    assert text_of({"hint": "warm", "left": 2}, "hint") == "warm"
    assert text_of({"hint": "warm", "left": 2}, "left") == "2"


@pytest.mark.parametrize(
    ("observation", "field", "said"),
    [
        ("warm", None, "an observation of the type str, not dict"),
        ({"hint": "warm"}, "text", 'without "text" .its fields: hint'),
        ({"hint": "\ud800"}, "hint", "a lone surrogate"),
        ({"hint": "x" * 1_000_001}, "hint", "1000001 characters"),
    ],
)
def test_an_observation_that_cannot_be_shown(observation, field, said):
    with pytest.raises(ValueError, match=said):
        text_of(observation, field)


@pytest.mark.skipif(find_spec("openenv") is not None, reason="the library is installed here")
def test_without_the_library_it_says_what_to_install():
    with pytest.raises(PluginError) as raised:
        load("environments", "openenv")
    assert "pip install 'rlhf-openenv[openenv]'" in raised.value.hint
