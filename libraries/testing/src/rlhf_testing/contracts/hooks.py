"""Contract of a hook plugin: its hooks exist, and a run with it completes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlhf_core.components import Component, HookContext
from rlhf_core.entry.train import train
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.plugins.discovery import PluginRef, find, import_target
from rlhf_core.plugins.selected import load

from ..runs import tiny_run


class HooksContract:
    """Tests of a hook plugin. Subclass it, name the class `Test…`, and set `plugin`, and `options` if it has any.

    Example:
        class TestMyHooks(HooksContract):
            plugin = "my-hooks"
    """

    plugin: ClassVar[str]
    """Name of its entry point."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of a `Component`, as in a run file."""

    @pytest.fixture(scope="class")
    @classmethod
    def ref(cls) -> PluginRef:
        assert getattr(cls, "plugin", None), f'{cls.__name__}: set the plugin to test: plugin = "its-name"'
        return find("hooks", cls.plugin)

    def test_its_hooks_exist(self, ref: PluginRef, tmp_path: Path) -> None:
        """Unknown hook names and arguments are rejected with a suggestion."""
        relay = HookRelay()
        plugin = import_target(ref)
        if isinstance(plugin, Component):
            config = plugin.config.model_validate(dict(self.options))
            plugin = load("hooks", ref.name).build(config, HookContext(run_folder=tmp_path))
        relay.register(plugin, name=ref.name, distribution=f"{ref.distribution} {ref.version}")
        assert any(relay.listens(event) for event in relay.events), "the plugin implements no hook"

    def test_a_run_with_it_is_done(self, ref: PluginRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Installed hook plugins are enabled in every run, a `Component` in runs that list it. Their errors end the
        run.
        """
        monkeypatch.chdir(tmp_path)
        plugin = import_target(ref)
        is_listed = isinstance(plugin, Component) and not plugin.always_on
        listed = {ref.name: dict(self.options)} if is_listed else {}
        run: dict[str, Any] = tiny_run({"train": {"episodes": 1}, "hooks": listed})
        result = train(run, output=tmp_path / "run")
        assert result is not None and result.summary["status"] == "done"
        log = (tmp_path / "run" / "run.log").read_text(encoding="utf-8")
        assert f"hook plugin {ref.name!r}" not in log, f"the run's log reports a problem with the plugin:\n{log}"
