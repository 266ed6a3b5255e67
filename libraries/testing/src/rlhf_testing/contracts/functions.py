"""The contract of functions that algorithms call by name: found once, options with defaults, told in a line."""

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
    """Its entry point's name, or `FILE.py:NAME`."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Options it is called with, as a run file gives them."""

    @pytest.fixture(scope="class")
    @classmethod
    def function(cls) -> Callable[[Any], Any]:
        """The function with its options bound, as an algorithm calls it."""
        assert getattr(cls, "plugin", None), f'{cls.__name__}: say which one is tested: plugin = "its-name"'
        return FunctionUse(cls.kind, {"name": cls.plugin, **cls.options}).bind(where=cls.__name__)

    def test_it_needs_no_options(self) -> None:
        FunctionUse(self.kind, self.plugin).bind(where="its name alone")

    def test_one_distribution_gives_the_name(self) -> None:
        if ".py:" not in self.plugin:
            find(self.kind, self.plugin)

    def test_its_docstring_begins_with_a_summary(self, function: Callable[[Any], Any]) -> None:
        line = (inspect.getdoc(inspect.unwrap(function)) or "").strip().partition("\n")[0]
        assert line, f"{self.plugin}: say in one line what it computes, and whose it is"
        assert len(line) <= MAX_SUMMARY, f"{self.plugin}: its first line has more than {MAX_SUMMARY} characters"
