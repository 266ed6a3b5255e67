"""Create and list tasks of the library, score answers, and detect verifiers that execute answers.

This module imports nothing from this project, because it also runs as a separate program in the sandbox.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from typing import Any

_RUN_TEXT = frozenset({"eval", "exec", "compile", "parse_expr", "sympify"})
"""Functions that run text as Python, including SymPy's parsers."""
_TUPLE_TASKS = frozenset({"arc_agi", "rearc"})
"""Tasks whose verifier compares with tuples, which JSON turns into lists."""


class UnknownTask(ValueError):
    """The task does not exist. `known_tasks` lists those that do."""

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(f'task "{name}" does not exist')
        self.known_tasks = known


def make_dataset(task: str, options: Mapping[str, Any], *, seed: int = 0, size: int = 1) -> Any:
    """Create the library's dataset of a task. Raise `UnknownTask`, or the library's errors about wrong options."""
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise UnknownTask(task, sorted(DATASETS))
    kwargs = dict(options)
    if task == "composite":
        kwargs["datasets"] = [DatasetSpec(**{"weight": 1, "config": {}, **spec}) for spec in kwargs.get("datasets", [])]
    return reasoning_gym.create_dataset(task, seed=seed, size=size, **kwargs)


def score(dataset: Any, task: str, entry: Mapping[str, Any], answer: str) -> float:
    """Score an answer to a problem read from JSON with the verifier. 0 if the verifier fails on the answer."""
    if task in _TUPLE_TASKS:
        entry = {**entry, "metadata": _with_tuples(entry["metadata"])}
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:  # verifiers are not designed for hostile answers
        return 0.0


def runs_answers(task: str, options: Mapping[str, Any]) -> bool:
    """Whether the module with a task's verifier may run text as Python."""
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
