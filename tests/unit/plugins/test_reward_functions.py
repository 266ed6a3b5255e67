"""A plain function is a reward; its keyword-only parameters are its strict options."""

import asyncio
import inspect
from pathlib import Path

import pytest
from pydantic import ValidationError

from rlhf_core.errors import PluginError
from rlhf_core.plugins.selected import load

FILE = '''
from __future__ import annotations
from typing import Annotated, Literal, Optional
from pydantic import Field
from dataclasses import dataclass

@dataclass
class Unused:
    value: int = 0

def brevity(rollouts, *, target: Annotated[int, Field(ge=1, description="Goal.")] = 8,
            mode: Literal["hard", "soft"] = "soft", unit: Optional[str] = None) -> list[float]:
    """Short answers are good.

    More text."""
    return [float(target)] * len(rollouts)

async def remote(rollouts, *, scale: float = 2.0):
    return [scale for _ in rollouts]

def untyped(rollouts, *, a=1): ...
def required(rollouts, *, a: int): ...
def neither(rollouts, *, a): ...
def swallow(rollouts, **options): ...
def two(rollouts, other): ...
def nothing(*, a: int = 1): ...
def odd(rollouts, *, a: "NoSuchType" = 1): ...
not_a_function = 3
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(FILE)
    return path


def test_a_function_in_a_file_is_a_reward(file):
    selected = load("rewards", f"{file}:brevity")
    assert selected.name == f"{file}:brevity"
    assert selected.component.summary == "Short answers are good."
    schema = selected.component.config.model_json_schema()["properties"]
    assert schema["target"] == {
        "default": 8,
        "description": "Goal.",
        "minimum": 1,
        "title": "Target",
        "type": "integer",
    }
    config = selected.component.config(target=5)
    assert selected.build(config, None)(["a", "b"]) == [5.0, 5.0]


def test_relative_paths_become_absolute(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert load("rewards", "./my_rewards.py:brevity").name == f"{file}:brevity"


def test_an_async_function_stays_async(file):
    selected = load("rewards", f"{file}:remote")
    reward = selected.build(selected.component.config(), None)
    assert inspect.iscoroutinefunction(reward)
    assert asyncio.run(reward([1, 2])) == [2.0, 2.0]


@pytest.mark.parametrize("options", [{"target": 0}, {"mode": "loud"}, {"tarqet": 3}])
def test_options_are_strict(file, options):
    with pytest.raises(ValidationError):
        load("rewards", f"{file}:brevity").component.config(**options)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("untyped", 'its option "a" lacks a type'),
        ("required", 'its option "a" lacks a default'),
        ("neither", 'its option "a" lacks a type and a default'),
        ("swallow", r"it takes \*\*kwargs"),
        ("two", "more positional parameters than the rollouts: other"),
        ("nothing", "it does not take the rollouts"),
        ("odd", "NoSuchType"),
        ("brevty", 'does not define a function "brevty"; did you mean "brevity"'),
        ("not_a_function", 'does not define a function "not_a_function"'),
    ],
)
def test_what_is_no_reward_is_explained(file, function, message):
    with pytest.raises(PluginError, match=message) as error:
        load("rewards", f"{file}:{function}")
    assert error.value.exit_code == 2


def test_a_file_that_is_not_there_or_fails(tmp_path):
    with pytest.raises(PluginError, match="no such file"):
        load("rewards", f"{tmp_path}/none.py:f")
    with pytest.raises(PluginError, match="does not name a function"):
        load("rewards", f"{tmp_path}/none.py")
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(PluginError, match=r"bad\.py fails to run: ZeroDivisionError"):
        load("rewards", f"{tmp_path}/bad.py:f")


def test_an_installed_function_is_a_reward(install):
    source = "def polite(rollouts, *, word: str = 'please'):\n    return [float(word in r) for r in rollouts]\n"
    install("acme", {"rlhf.rewards": {"polite": "acme_polite:polite"}}, {"acme_polite": source})
    selected = load("rewards", "polite")
    assert (selected.distribution, selected.component.build) == ("acme", "acme_polite:polite")
    assert selected.build(selected.component.config(word="x"), None)(["ax", "b"]) == [1.0, 0.0]
