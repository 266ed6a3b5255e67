"""The contract of a logger: it takes the numbers of a run, again after a resume, and a run with it completes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import BaseModel

from rlhf_core.components import HookContext
from rlhf_core.entry.train import train
from rlhf_core.plugins.selected import SelectedPlugin
from rlhf_core.protocols import Logger

from ..runs import tiny_run
from .base import ComponentContract

Logged = Mapping[str, Mapping[int, float]]
"""Name of a metric -> update -> value."""


class LoggerContract(ComponentContract):
    """Override `logged` where what was written can be read back."""

    kind = "loggers"

    @classmethod
    def logged(cls, run_folder: Path, config: BaseModel) -> Logged | None:
        """The updates that the logger has written for this run folder, each once; None: they cannot be read."""
        return None

    @pytest.fixture
    def run_folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "a-run"
        folder.mkdir()
        return folder

    def test_it_has_log_and_finish(self, selected: SelectedPlugin, config: BaseModel, run_folder: Path) -> None:
        logger = _build(selected, config, run_folder)
        assert isinstance(logger, Logger), (
            f"{selected.label}: build returns a {type(logger).__name__}; it needs log(step, values) and finish(failed)"
        )

    def test_a_run_without_an_update_is_nothing(
        self, selected: SelectedPlugin, config: BaseModel, run_folder: Path
    ) -> None:
        _build(selected, config, run_folder).finish(True)

    def test_numbers_arrive_and_a_resume_makes_some_again(
        self, selected: SelectedPlugin, config: BaseModel, run_folder: Path
    ) -> None:
        """Metrics come and go from line to line; a resume is another process, a rollback the same object."""
        first = _build(selected, config, run_folder)
        for step in range(1, 5):
            first.log(step, {"reward/mean": step / 8, **({"eval/score": 0.5} if step == 2 else {})})
        first.finish(True)
        second = _build(selected, config, run_folder)
        second.log(3, {"reward/mean": 0.75})
        second.finish(False)
        second.log(4, {"reward/mean": 1.0, "kl/mean": 0.25})
        second.finish(False)
        found = self.logged(run_folder, config)
        if found is not None:
            assert found["reward/mean"] == pytest.approx({1: 0.125, 2: 0.25, 3: 0.75, 4: 1.0})
            assert found["eval/score"] == pytest.approx({2: 0.5})
            assert found["kl/mean"] == pytest.approx({4: 0.25})

    def test_a_run_with_it_is_done(self, selected: SelectedPlugin, given: dict[str, Any], tmp_path: Path) -> None:
        run = tiny_run({"train": {"episodes": 1}, "logging": {selected.name: given or True}})
        result = train(run, output=tmp_path / "run")
        assert result is not None and result.summary["status"] == "done"


def _build(selected: SelectedPlugin, config: BaseModel, run_folder: Path) -> Logger:
    context = HookContext(run_folder=run_folder, run={"train": {"episodes": 1}, "rewards": [{"name": "exact-match"}]})
    return cast(Logger, selected.build(config, context))
