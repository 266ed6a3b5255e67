"""Options, and selecting the environment where the library is missing."""

from importlib.util import find_spec

import pytest
from pydantic import ValidationError

from rlhf_core.errors import PluginError
from rlhf_core.plugins import load
from rlhf_mcp.config import McpConfig


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "command"),
        ({"command": []}, "command"),
        ({"command": "./serve"}, "command"),
        ({"command": ["./serve", "\0"]}, "command.1"),
        ({"command": ["a"], "env": ["A=b"]}, "env.0"),
        ({"command": ["a"], "env": {"A": "b"}}, "env"),
        ({"command": ["a"], "tools": []}, "tools"),
        ({"command": ["a"], "tools": ["add", "score"], "reward_tool": "score"}, "'score' is hidden from the policy"),
    ],
)
def test_options_that_are_refused(options, said):
    with pytest.raises(ValidationError, match=said):
        McpConfig(**options)


@pytest.mark.skipif(find_spec("mcp") is not None, reason="the library is installed here")
def test_without_the_library_it_says_what_to_install():
    with pytest.raises(PluginError) as raised:
        load("environments", "mcp")
    assert raised.value.hint == "pip install 'rlhf-mcp[mcp]'"
