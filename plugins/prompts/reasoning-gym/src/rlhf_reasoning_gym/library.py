"""Tasks of the library: makes and lists them, scores answers, and tells whose verifier executes answers.

Imports nothing of this project: it also runs as a separate program, and inside the sandbox.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from typing import Any

_RUN_TEXT = frozenset({"eval", "exec", "compile", "parse_expr", "sympify"})
"""Calls that run text as Python, SymPy's parsers included."""
_OF_TUPLES = frozenset({"arc_agi", "rearc"})
"""Tasks whose verifier compares with tuples, which are lists in JSON."""


class UnknownTask(ValueError):
    """No task has that name; `known` lists those that exist."""

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(f'there is no task "{name}"')
        self.known = known


def make_dataset(task: str, options: Mapping[str, Any], *, seed: int = 0, size: int = 1) -> Any:
    """The library's dataset of a task. Raises `UnknownTask`, and the library's errors about wrong options."""
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise UnknownTask(task, sorted(DATASETS))
    given = dict(options)
    if task == "composite":
        given["datasets"] = [DatasetSpec(**{"weight": 1, "config": {}, **each}) for each in given.get("datasets", [])]
    return reasoning_gym.create_dataset(task, seed=seed, size=size, **given)


def score(dataset: Any, task: str, entry: Mapping[str, Any], answer: str) -> float:
    """The verifier's score of an answer to a problem read from JSON; 0 where the verifier fails on the answer."""
    if task in _OF_TUPLES:
        entry = {**entry, "metadata": _with_tuples(entry["metadata"])}
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:  # verifiers are not written for hostile answers
        return 0.0


def runs_answers(task: str, options: Mapping[str, Any]) -> bool:
    """Whether the module that holds a task's verifier may run text as Python."""
    if task == "composite":
        return any(runs_answers(each["name"], {}) for each in options.get("datasets", []))
    from reasoning_gym.factory import DATASETS

    owners = {owner.__module__ for owner in DATASETS[task][0].__mro__ if owner.__module__.startswith("reasoning_gym")}
    return any(_runs_text(inspect.getsource(sys.modules[owner])) for owner in owners)


def _runs_text(source: str) -> bool:
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    names = {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}
    return bool(names & _RUN_TEXT)


def _with_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_tuples(each) for key, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
