"""Which action a reply says, and how an observation is written."""

from types import SimpleNamespace

import pytest

from rlhf_core.errors import ConfigError
from rlhf_gymnasium.actions import named, numbered
from rlhf_gymnasium.text import plain, strip_colors, template


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2", 2),
        ("first 1, then 3.", 3),
        ("1-2", 2),
        ("action: 0", 0),
        ("", None),
        ("none", None),
        ("4", None),
        ("1 or 4", None),
        ("-1", None),
        ("2.5", None),
        ("x1", None),
        ("1_000", None),
        ("٣", None),
        ("1" * 100_000, None),
    ],
)
def test_the_last_whole_number_is_the_action(text, action):
    assert numbered(0, 4)(text) == action


def test_numbers_begin_where_the_space_does():
    read = numbered(5, 2)
    assert [read(text) for text in ("4", "5", "6", "7")] == [None, 5, 6, None]


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("LEFT", 0),
        ("not left but right", 1),
        ("right now: go left!", 0),
        ("go left up", 2),
        ("leftover", None),
        ("1", None),
        ("", None),
    ],
)
def test_the_last_name_is_the_action(text, action):
    assert named(["Left", "right", "left up"], 0, 3)(text) == action


def test_as_many_names_as_actions():
    with pytest.raises(ConfigError, match="has 2 names, but the environment has 4 actions"):
        named(["left", "right"], 0, 4)


def test_an_observation_in_a_template():
    def write(text, observation=(1, 2.5)):
        return template(text)(observation, {}, lambda: "a\x1b[41mS\x1b[0mb\n")

    assert write(">{observation},") == ">[1, 2.5],"
    assert write("{render} at {observation}", "{render}") == "a[S]b at {render}"
    assert write("{info} {observation.x} {}") == "{info} {observation.x} {}"


def test_arrays_are_lists_and_text_is_text():
    array = SimpleNamespace(tolist=lambda: [1, 2])
    assert plain({"a": array, "b": (1, None)}) == '{"a": [1, 2], "b": [1, null]}'
    assert plain("as it is") == "as it is"
    assert plain(7) == "7"


def test_colours_become_brackets():
    taxi = "|\x1b[34;1mR\x1b[0m: |\x1b[43m \x1b[0m:\x1b[32mG\x1b[0m|\x1b[0m"
    assert strip_colors(taxi) == "|[R]: |[ ]:[G]|"
