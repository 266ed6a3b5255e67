"""Contract of a logger: it records the metrics of a run, also after a resume, and a run with it completes."""

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
"""Values by metric name and update."""


class LoggerContract(ComponentContract):
    """Tests of a logger. Override `logged` if the output can be read back.

    Example:
        class TestMyLogger(LoggerContract):
            plugin = "my-logger"
    """

    kind = "loggers"

    @classmethod
    def logged(cls, run_folder: Path, config: BaseModel) -> Logged | None:
        """Return the values that the logger wrote for this run folder, each update once. None if they cannot be read.

        Args:
            run_folder: Folder of the run.
            config: Options of the logger.
        """
        return None

    @pytest.fixture
    def run_folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "a-run"
        folder.mkdir()
        return folder

    def test_it_has_log_and_finish(self, selected: SelectedPlugin, config: BaseModel, run_folder: Path) -> None:
        logger = _build(selected, config, run_folder)
        assert isinstance(logger, Logger), (
            f"{selected.label}: a {type(logger).__name__} lacks log(step, values) or finish(failed)"
        )

    def test_a_run_without_an_update_is_nothing(
        self, selected: SelectedPlugin, config: BaseModel, run_folder: Path
    ) -> None:
        _build(selected, config, run_folder).finish(True)

    def test_numbers_arrive_and_a_resume_makes_some_again(
        self, selected: SelectedPlugin, config: BaseModel, run_folder: Path
    ) -> None:
        """Metrics vary between updates. A resume is another process, a rollback uses the same object."""
        first = _build(selected, config, run_folder)
        for step in range(1, 5):
            first.log(step, {"reward/mean": step / 8, **({"eval/score": 0.5} if step == 2 else {})})
        first.finish(True)
        second = _build(selected, config, run_folder)
        second.log(3, {"reward/mean": 0.75})
        second.finish(False)
        second.log(4, {"reward/mean": 1.0, "kl/mean": 0.25})
        second.finish(False)
        logged = self.logged(run_folder, config)
        if logged is not None:
            assert logged["reward/mean"] == pytest.approx({1: 0.125, 2: 0.25, 3: 0.75, 4: 1.0})
            assert logged["eval/score"] == pytest.approx({2: 0.5})
            assert logged["kl/mean"] == pytest.approx({4: 0.25})

    def test_a_run_with_it_is_done(self, selected: SelectedPlugin, given: dict[str, Any], tmp_path: Path) -> None:
        run = tiny_run({"train": {"episodes": 1}, "logging": {selected.name: given or True}})
        result = train(run, output=tmp_path / "run")
        assert result is not None and result.summary["status"] == "done"


def _build(selected: SelectedPlugin, config: BaseModel, run_folder: Path) -> Logger:
    context = HookContext(run_folder=run_folder, run={"train": {"episodes": 1}, "rewards": [{"name": "exact-match"}]})
    return cast(Logger, selected.build(config, context))
