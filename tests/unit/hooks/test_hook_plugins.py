from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from rlhf_core.errors import HookError, PluginError
from rlhf_core.hooks.installed import load_hook_plugins
from rlhf_core.hooks.relay import HookRelay


def install(site: Path, distribution: str, name: str, source: str) -> None:
    """A distribution as an installer leaves it: a module and its metadata."""
    module = distribution.replace("-", "_")
    (site / f"{module}.py").write_text(source)
    info = site / f"{module}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[rlhf.hooks]\n{name} = {module}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


RAISES = "def rlhf_metrics(line):\n    raise ValueError('bad line')\n"


def test_an_installed_plugin_is_on_and_named_with_its_distribution(site: Path):
    install(site, "hooks-of-a-stranger", "stranger", RAISES)
    relay = HookRelay()
    load_hook_plugins(relay)
    assert "stranger" in relay.plugins
    with pytest.raises(HookError, match=r"'stranger' \(hooks-of-a-stranger 1\.2\): rlhf_metrics.*bad line"):
        relay.fire("metrics", line={"step": 1})


def test_disabled_by_name_whatever_its_case_or_dashes(site: Path):
    install(site, "loud-hooks", "loud_one", RAISES)
    load_hook_plugins(relay := HookRelay(), disable=["Loud-One"])
    assert "loud_one" not in relay.plugins


def test_a_broken_plugin_is_reported_and_hurts_nobody(site: Path, caplog: pytest.LogCaptureFixture):
    install(site, "aa-broken", "broken", "import a_module_that_is_not_there\n")
    install(site, "ab-exits", "exits", "raise SystemExit(3)\n")
    install(site, "bb-empty", "empty", "VALUE = 1\n")
    install(site, "cc-fine", "fine", "def rlhf_metrics(line):\n    pass\n")
    with caplog.at_level(logging.WARNING, "rlhf"):
        load_hook_plugins(relay := HookRelay())
    loaded = set(relay.plugins)
    assert "fine" in loaded and not {"broken", "exits", "empty"} & set(loaded)
    assert "'broken' (aa-broken 1.2)" in caplog.text and "disable: [broken]" in caplog.text
    assert "'exits' (ab-exits 1.2)" in caplog.text and "'empty' (bb-empty 1.2)" in caplog.text


def test_two_distributions_with_one_name_are_an_error(site: Path):
    install(site, "one-hooks", "same", RAISES)
    install(site, "two-hooks", "Same", RAISES)
    with pytest.raises(PluginError, match=r"one-hooks 1\.2.*two-hooks 1\.2|two-hooks 1\.2.*one-hooks 1\.2"):
        load_hook_plugins(HookRelay())


@pytest.mark.parametrize("old", ["rlhf_verdict", "rlhf_episode_verdict"])
def test_a_hook_of_before_is_refused_by_name(old: str):
    plugin = type("Guard", (), {old: lambda self, step: None})()
    with pytest.raises(PluginError, match=old) as caught:
        HookRelay().register(plugin, name="guard", distribution="old-guards 1.0")
    assert "old-guards 1.0" in str(caught.value) and "rlhf_decide" in str(caught.value)


@pytest.mark.parametrize("answer", ["stop", {"kind": "stop"}, [3]])
def test_an_answer_that_is_no_action_names_the_plugin(answer: object):
    relay = HookRelay()
    relay.register(type("Wrong", (), {"rlhf_decide": lambda self: answer})(), distribution="wrong-guards 1.0")
    with pytest.raises(HookError, match=r"wrong-guards 1\.0.*rlhf_decide returned (str|dict|int), not an Action"):
        relay.fire("decide", moment=None)
