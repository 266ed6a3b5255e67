"""Functions as tools: what a model is told of them, and what becomes of its arguments."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pytest

from rlhf_core.errors import PluginError
from rlhf_core.types import ToolCall
from rlhf_episodes.tool_functions import ToolFunction

if TYPE_CHECKING:
    from nowhere import Answer


def search(
    query: str, limit: int = 10, *, order: Literal["new", "old"] = "new", tags: list[str] | None = None
) -> Answer:
    """Searches the archive.

    Finds at most `limit` pages.

    Args:
        query: What to look for.
            Words may be: quoted.
        limit (int): How many.

    Returns:
        Their titles.
    """


class Game:
    def move(self, column: int) -> str:
        """Drops a stone."""
        return str(column)


@dataclass
class Point:
    x: float
    y: float


def draw(points: list[Point], at: datetime.date, box: tuple[int, int], copy: Any, model_config: dict[str, int]) -> None:
    """Draws."""


def bind(function, arguments):
    return ToolFunction(function).bind(ToolCall(name=function.__name__, arguments=arguments))


def test_a_function_is_described_by_signature_and_docstring():
    assert ToolFunction(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches the archive.\n\nFinds at most `limit` pages.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for. Words may be: quoted."},
                    "limit": {"type": "integer", "description": "How many.", "default": 10},
                    "order": {"type": "string", "enum": ["new", "old"], "default": "new"},
                    "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
                },
                "required": ["query"],
            },
        },
    }


def test_a_method_is_described_without_self():
    tool = ToolFunction(Game().move)
    assert tool.name == "move" and tool.schema["function"]["description"] == "Drops a stone."
    assert tool.schema["function"]["parameters"]["properties"] == {"column": {"type": "integer"}}
    arguments = tool.bind(ToolCall(name="move", arguments={"column": 3}))
    assert isinstance(arguments, dict) and tool.function(**arguments) == "3"


def test_a_function_without_parameters():
    def now() -> str:
        """Tells the time."""

    assert ToolFunction(now).schema["function"]["parameters"] == {"type": "object", "properties": {}}
    assert bind(now, {}) == {}
    assert bind(now, {"zone": "UTC"}) == 'now was not called: there is no argument "zone". Its arguments: none.'


def test_arguments_take_the_parameters_types():
    assert bind(search, {"query": "a"}) == {"query": "a"}  # the function's own defaults
    given = {"points": [{"x": 1, "y": 2.5}], "at": "2024-02-29", "box": [1, 2], "copy": None, "model_config": {"a": 1}}
    assert bind(draw, given) == {
        "points": [Point(1.0, 2.5)],
        "at": datetime.date(2024, 2, 29),
        "box": (1, 2),
        "copy": None,
        "model_config": {"a": 1},
    }


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, 'argument "query" is missing'),
        ({"query": 5}, 'argument "query": Input should be a valid string'),
        ({"query": "a", "limit": "5"}, 'argument "limit": Input should be a valid integer'),
        ({"query": "a", "limit": True}, 'argument "limit": Input should be a valid integer'),
        ({"query": "a", "order": "best"}, "argument \"order\": Input should be 'new' or 'old'"),
        ({"query": "a", "tags": [1]}, 'argument "tags.0": Input should be a valid string'),
        ({"query": "a", "x" * 1000: 1}, f'there is no argument "{"x" * 80}"'),
        ({"q": "a", "limit": 1.5}, 'argument "query" is missing; argument "limit": Input should be a valid integer; '
         'there is no argument "q"'),
    ],
)  # fmt: skip
def test_what_is_wrong_with_arguments_is_told(arguments, problem):
    takes = "Its arguments: query, limit (optional), order (optional), tags (optional)."
    assert bind(search, arguments) == f"search was not called: {problem}. {takes}"


def test_many_problems_are_told_shortly():
    text = bind(search, {"query": "a", **{f"z{place}": 1 for place in range(1000)}})
    assert "and 995 more" in text and len(text) < 500


def test_a_call_that_could_not_be_read_is_told_as_such():
    call = ToolCall(name="", error="The tool call could not be read: why.")
    assert ToolFunction(search).bind(call) == call.error


def undocumented(a: int) -> int:
    return a


def untyped(a, b: int) -> int:
    """Adds."""


def open_ended(*numbers: int) -> int:
    """Adds."""


def unknown(a: Answer) -> int:
    """Adds."""


def odd(a: pytest.MonkeyPatch) -> int:
    """Adds."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (undocumented, r'tool "undocumented": its docstring is missing\n  -> describe it to the model in one'),
        (untyped, r'tool "untyped": its parameter "a" is not annotated\n  -> write its type, as in `a: int`'),
        (open_ended, r'tool "open_ended": its parameter "\*numbers: .*int.*" cannot be passed by name'),
        (unknown, r"tool \"unknown\": its signature cannot be read: name 'Answer' is not defined"),
        (odd, r'tool "odd": its types cannot be described by a schema: .*MonkeyPatch'),
        (Game.move, r'tool "Game.move": its parameter "self" is not annotated'),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_named(function, message):
    with pytest.raises(PluginError, match=message):
        ToolFunction(function)
