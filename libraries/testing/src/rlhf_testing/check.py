"""Check one plugin in this process: run the contract suite of its kind with the plugin's default options.

A plugin that needs more (an option without default, special answers or prompts, a GPU) gets the verdict "not run" with
the reason, not "broken".
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
"""Contract suite of each kind. That of an algorithm depends on `feeds`. Loggers lack one here, since their suite might
write to a server."""


class Verdict(NamedTuple):
    """Result for one plugin."""

    status: Literal["ok", "not run", "not installed", "broken"]
    detail: str


def check_plugin(ref: PluginRef, *, whole: bool) -> Verdict:
    """Check a plugin's declaration and that it can be imported.

    Args:
        ref: Plugin to check.
        whole: Also run the contract suite of its kind.

    Returns:
        Status and detail: the summary if it is ok, otherwise the problem.
    """
    try:
        check_clash(ref)
        if ref.kind in KINDS and has_options(ref):
            selected = load_ref(ref)
            if (missing := unmet(selected.component, selected.distribution)) is not None:
                return Verdict("not installed", ": ".join(missing))
            summary = selected.component.summary
        else:
            target = import_target(ref)
            if ref.kind not in _SUITES:
                return Verdict("ok", "")
            summary = (inspect.getdoc(target) or "").partition("\n")[0]
    except PluginError as error:
        return Verdict("broken", error.message)
    recorder = _FailureRecorder()
    with TemporaryDirectory() as folder:
        Path(folder, "pytest.ini").touch()  # keeps pytest from reading the configuration of a parent folder
        suite = Path(folder, f"test_{abs(hash((ref.kind, ref.name)))}.py")  # pytest imports only one file per name
        suite.write_text(f"from {__name__} import suite\n\nTestPlugin = suite({ref.kind!r}, {ref.name!r}, {whole})\n")
        # Heavy imports only slow commands down, so they are not an error.
        options = ["--maxfail=1", "-k", "not light", "-p", "no:cacheprovider", "--assert=plain", "-W", "ignore"]
        pytest.main([*options, str(suite)], [recorder])
    if recorder.problem is not None:
        return Verdict("broken", recorder.problem)
    return Verdict("not run", f"{summary} ({recorder.missing})") if recorder.missing else Verdict("ok", summary)


def suite(kind: str, name: str, whole: bool) -> type:
    """Build the test class of a plugin."""
    ref = find(kind, name)
    bases: tuple[type, ...] = (_SUITES[kind],) if kind in _SUITES else ()
    if ref.kind in KINDS and has_options(ref):
        selected = load_ref(ref)
        if kind == "algorithms":
            feeds = selected.component.feeds
            bases = (contracts.DatasetAlgorithmContract if feeds == "dataset" else contracts.AlgorithmContract,)
        bases = (_DefaultOptions, *(bases if whole else ()), contracts.ComponentContract)
    return type("TestPlugin", bases, {"kind": kind, "plugin": name})


class _DefaultOptions:
    """Test a plugin with its default options."""

    @pytest.fixture(scope="class")
    @classmethod
    def config(cls, selected: SelectedPlugin) -> BaseModel:
        return selected.component.config()


class _FailureRecorder:
    """Pytest plugin that records the message of the first failed test."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.missing: str | None = None
        """Requirement without which the plugin cannot be run here."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.excinfo is not None and report.failed:
            error = call.excinfo.value
            self.missing = _missing_requirement(error)
            if self.missing is None:
                self.problem = f"{_message(error)} ({item.name})"
        return report


def _missing_requirement(error: BaseException) -> str | None:
    """Requirement of the plugin that explains the error. None if the plugin is broken."""
    caused = error.__context__ if isinstance(error, pytest.fail.Exception) else None
    for each in (error, caused):
        if isinstance(each, ValidationError):
            problem = each.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            needs = f"requires the option {where}" if problem["type"] == "missing" else problem["msg"]
            return needs.removeprefix("Value error, ")
        if isinstance(each, EpisodeError) and each.message.startswith("reset "):
            return f"cannot play a task without a prompt: {each.message}"
        if isinstance(each, RewardError) and " raised " in each.message:
            return f"cannot score made-up answers: {each.message}"
        if isinstance(each, UserInputError) and not isinstance(each, PluginError):
            return each.message
    return None


def _message(error: BaseException) -> str:
    if isinstance(error, RlhfError):
        return error.message
    line = str(error).partition("\n")[0]
    return line if isinstance(error, AssertionError | pytest.fail.Exception) else f"{type(error).__name__}: {line}"
