"""Tasks of the library: made, listed, and judged by whether their verifier runs what it is given.

Stands alone, without this project: it is also run as a program, and as one that is shut in.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from typing import Any

_RUN_TEXT = frozenset({"eval", "exec", "compile", "parse_expr", "sympify"})
"""Calls that run text as Python (SymPy's parsers, too)."""
_OF_TUPLES = frozenset({"arc_agi", "rearc"})
"""Tasks whose verifier compares with tuples, which are lists in JSON."""


class UnknownTask(ValueError):
    """No task of that name; `known` are those there are."""

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(f'there is no task "{name}"')
        self.known = known


def make_dataset(task: str, options: Mapping[str, Any], *, seed: int = 0, size: int = 1) -> Any:
    """The library's dataset of a task. Raises `UnknownTask`, and what the library says of wrong options."""
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
    """What the task's verifier says of an answer to a problem that has been JSON; 0 where it fails on the answer."""
    if task in _OF_TUPLES:
        entry = {**entry, "metadata": _with_tuples(entry["metadata"])}
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:  # verifiers are written for answers in good faith
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
