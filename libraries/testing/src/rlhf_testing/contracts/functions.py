"""Contract of functions that algorithms call by name: unique, options with defaults, documented in one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from rlhf_core.plugins.discovery import find
from rlhf_objective.named_functions import FunctionKind, FunctionUse

from .base import MAX_SUMMARY


class FunctionContract:
    """Base of `AdvantageContract` and `PolicyLossContract`: subclass one, name the class `Test…`, and set `plugin`."""

    kind: ClassVar[FunctionKind]
    plugin: ClassVar[str]
    """Name of its entry point, or `FILE.py:NAME`."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Options to call it with, as in a run file."""

    @pytest.fixture(scope="class")
    @classmethod
    def function(cls) -> Callable[[Any], Any]:
        """The function with its options bound, as an algorithm calls it."""
        assert getattr(cls, "plugin", None), f'{cls.__name__}: set the function to test: plugin = "its-name"'
        return FunctionUse(cls.kind, {"name": cls.plugin, **cls.options}).bind(where=cls.__name__)

    def test_it_needs_no_options(self) -> None:
        FunctionUse(self.kind, self.plugin).bind(where="its name alone")

    def test_one_distribution_gives_the_name(self) -> None:
        if ".py:" not in self.plugin:
            find(self.kind, self.plugin)

    def test_its_docstring_begins_with_a_summary(self, function: Callable[[Any], Any]) -> None:
        line = (inspect.getdoc(inspect.unwrap(function)) or "").strip().partition("\n")[0]
        assert line, f"{self.plugin}: add a one-line docstring with the formula and its source"
        assert len(line) <= MAX_SUMMARY, f"{self.plugin}: the docstring's first line exceeds {MAX_SUMMARY} characters"
