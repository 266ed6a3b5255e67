"""Checks one plugin in this process: has pytest run the suite of its kind with what the plugin has by default.

A plugin that needs more (an option without default, other answers or prompts than made-up ones, a GPU) is not broken
but not run here; the verdict says why.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import pytest
from pydantic import BaseModel, ValidationError

from rlhf_core.components import KINDS
from rlhf_core.errors import EpisodeError, PluginError, RewardError, RlhfError, UserInputError
from rlhf_core.plugins.discovery import PluginRef, check_clash, find, import_target
from rlhf_core.plugins.requirements import unmet
from rlhf_core.plugins.selected import SelectedPlugin, has_options, load_ref

from . import contracts

_SUITES: Mapping[str, type] = {
    "strategies": contracts.StrategyContract,
    "rewards": contracts.RewardContract,
    "transports": contracts.TransportContract,
    "engines": contracts.EngineContract,
    "prompts": contracts.PromptsContract,
    "environments": contracts.EnvironmentContract,
    "hooks": contracts.HooksContract,
    "advantages": contracts.AdvantageContract,
    "policy_losses": contracts.PolicyLossContract,
}
"""Kind -> its suite. That of an algorithm depends on what it learns from; a logger's might write to a server."""


class Verdict(NamedTuple):
    """On one plugin."""

    status: Literal["ok", "not run", "not installed", "broken"]
    detail: str


def check_plugin(ref: PluginRef, *, whole: bool) -> Verdict:
    """whole: run the suite of its kind, not only what it says about itself and whether it can be imported."""
    try:
        check_clash(ref)
        if ref.kind in KINDS and has_options(ref):
            selected = load_ref(ref)
            if (lack := unmet(selected.component, selected.distribution)) is not None:
                return Verdict("not installed", ": ".join(lack))
            summary = selected.component.summary
        else:
            found = import_target(ref)
            if ref.kind not in _SUITES:
                return Verdict("ok", "")
            summary = (inspect.getdoc(found) or "").partition("\n")[0]
    except PluginError as error:
        return Verdict("broken", error.message)
    noted = _Noted()
    with TemporaryDirectory() as folder:
        Path(folder, "pytest.ini").touch()  # that of no other folder counts
        suite = Path(folder, f"test_{abs(hash((ref.kind, ref.name)))}.py")  # pytest imports no two of one name
        suite.write_text(f"from {__name__} import suite\n\nTestPlugin = suite({ref.kind!r}, {ref.name!r}, {whole})\n")
        # Heavy imports slow commands down, and break nothing.
        options = ["--maxfail=1", "-k", "not light", "-p", "no:cacheprovider", "--assert=plain", "-W", "ignore"]
        pytest.main([*options, str(suite)], [noted])
    if noted.problem is not None:
        return Verdict("broken", noted.problem)
    return Verdict("ok", summary) if noted.lack is None else Verdict("not run", f"{summary} ({noted.lack})")


def suite(kind: str, name: str, whole: bool) -> type:
    """The test class of a plugin."""
    ref = find(kind, name)
    bases: tuple[type, ...] = (_SUITES[kind],) if kind in _SUITES else ()
    if ref.kind in KINDS and has_options(ref):
        selected = load_ref(ref)
        if kind == "algorithms":
            feeds = selected.component.feeds
            bases = (contracts.DatasetAlgorithmContract if feeds == "dataset" else contracts.AlgorithmContract,)
        bases = (_AsItIs, *(bases if whole else ()), contracts.ComponentContract)
    return type("TestPlugin", bases, {"kind": kind, "plugin": name})


class _AsItIs:
    """A plugin with its default options."""

    @pytest.fixture(scope="class")
    @classmethod
    def config(cls, selected: SelectedPlugin) -> BaseModel:
        return selected.component.config()


class _Noted:
    """What the first test that did not pass said (a plugin of pytest)."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.lack: str | None = None
        """What the plugin needs to be run."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.excinfo is not None and report.failed:
            error = call.excinfo.value
            self.lack = _lack(error)
            if self.lack is None:
                self.problem = f"{_text(error)} ({item.name})"
        return report


def _lack(error: BaseException) -> str | None:
    """What a plugin needs that raised this; None where it is broken."""
    caused = error.__context__ if isinstance(error, pytest.fail.Exception) else None
    for each in (error, caused):
        if isinstance(each, ValidationError):
            problem = each.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            needs = f"needs the option {where}" if problem["type"] == "missing" else problem["msg"]
            return needs.removeprefix("Value error, ")
        if isinstance(each, EpisodeError) and each.message.startswith("reset "):
            return f"a task without a prompt: {each.message}"
        if isinstance(each, RewardError) and " raised " in each.message:
            return f"made-up answers: {each.message}"
        if isinstance(each, UserInputError) and not isinstance(each, PluginError):
            return each.message
    return None


def _text(error: BaseException) -> str:
    if isinstance(error, RlhfError):
        return error.message
    said = str(error).partition("\n")[0]
    return said if isinstance(error, AssertionError | pytest.fail.Exception) else f"{type(error).__name__}: {said}"
