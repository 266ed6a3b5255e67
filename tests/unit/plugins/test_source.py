"""The options of a file's function are read from its source; nothing of the file is run."""

import pytest
from pydantic import ValidationError

from rlhf_core.errors import PluginError
from rlhf_core.plugins.selected import load
from rlhf_core.plugins.source import read_options
from rlhf_core.plugins.trust import NO_FILE

FILE = '''
from __future__ import annotations
from typing import Annotated
from pydantic import Field
from acme import Shape, wrapped

open("was-run", "w").close()
WORDS = ("a", "b")
str = repr

def brevity(rollouts, *, target: Annotated[int, Field(ge=1)] = 8, size: int = 3, names: list[int] = [1, 2],
            unit: float | None = None, hard: "bool | None" = None, far: int = -1):
    """Short answers are good.

    More text."""

async def remote(rollouts, *, words: int = WORDS, shape: Shape = None, name: str = "x", many: int = 2 * 3): ...
@wrapped
def decorated(rollouts, *, a: int = 1): ...
def twice(rollouts): ...
def twice(rollouts, *, a: int = 1): ...
class Game:
    """A game."""
    def __init__(self, *, size: int = 3, seed: Shape = None): ...
class Inherits(Shape): ...
def untyped(rollouts, *, a=1): ...
def required(rollouts, *, a: int): ...
def swallow(rollouts, **options): ...
def two(rollouts, other): ...
def nothing(*, a: int = 1): ...
'''


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    yield "./mine.py"
    assert not (tmp_path / "was-run").exists()


def test_types_and_literal_defaults_are_told(file, tmp_path):
    path, component, unread = read_options(f"{file}:brevity", "rewards", where="here")
    assert (path, component.summary) == (tmp_path / "mine.py", "Short answers are good.")
    assert unread == ("type of target", "type of names")
    defaults = component.config().model_dump(mode="json")
    assert defaults == {"target": 8, "size": 3, "names": [1, 2], "unit": None, "hard": None, "far": -1}
    for wrong in ({"size": "x"}, {"unit": "m"}, {"hard": 2}, {"far": None}, {"tarqet": 1}):
        with pytest.raises(ValidationError):
            component.config.model_validate(wrong, strict=True)


def test_what_cannot_be_told_takes_any_value_and_shows_no_default(file):
    _, component, unread = read_options(f"{file}:remote", "rewards", where="here")
    assert unread == ("default of words", "type of shape", "type of name", "default of many")
    assert component.config().model_dump(mode="json") == {"shape": None, "name": "x"}
    assert component.config(words=3, shape=[1]).model_dump(mode="json") == {"words": 3, "shape": [1], "name": "x"}


@pytest.mark.parametrize("name", ["decorated", "twice", "wrapped"])
def test_a_signature_that_comes_from_elsewhere_takes_any_options(file, name):
    _, component, unread = read_options(f"{file}:{name}", "rewards", where="here")
    assert "all options" in unread[0]
    assert component.config(whatever=1).model_dump() == {"whatever": 1}


def test_a_class_has_the_options_of_its_constructor(file):
    _, component, unread = read_options(f"{file}:Game", "environments", where="here")
    assert (component.summary, unread) == ("A game.", ("type of seed",))
    assert component.config().model_dump() == {"size": 3, "seed": None}
    assert "all options" in read_options(f"{file}:Inherits", "environments", where="here")[2][0]
    for name in ("gone", "brevity"):
        with pytest.raises(PluginError, match=f'has no class "{name}"'):
            read_options(f"{file}:{name}", "environments", where="here")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("untyped", 'its option "a" has no type'),
        ("required", 'its option "a" has no default'),
        ("swallow", r"it takes \*\*kwargs"),
        ("two", "more than the rollouts by position: other"),
        ("nothing", "it takes no rollouts"),
        ("brevty", 'has no function "brevty"; did you mean "brevity"'),
    ],
)
def test_what_is_no_reward_is_explained_as_when_it_is_run(file, function, message):
    with pytest.raises(PluginError, match=message):
        load("rewards", f"{file}:{function}", trust=NO_FILE)


@pytest.mark.parametrize(
    "source",
    [b"def f(", b"\x00", b"\xff\xfe", b"x = " + b"9" * 5000, b"-" * 200_000 + b"1", b"(" * 5000, b"f" + b".a" * 20_000],
    ids=["syntax", "nul", "encoding", "digits", "minus", "brackets", "attributes"],
)
def test_a_file_that_is_no_python_is_one_error(tmp_path, source):
    path = tmp_path / "bad.py"
    path.write_bytes(source)
    with pytest.raises(PluginError, match=r"bad\.py"):
        read_options(f"{path}:f", "rewards", where="here")


def test_a_file_that_ends_the_process_is_an_error(tmp_path):
    path = tmp_path / "leaves.py"
    path.write_text("import sys\nsys.exit(0)\ndef f(rollouts): ...\n")
    with pytest.raises(PluginError, match=r"leaves\.py fails to run: SystemExit: 0"):
        load("rewards", f"{path}:f")
