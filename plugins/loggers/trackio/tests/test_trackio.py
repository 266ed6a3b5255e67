"""Trackio: core's contract over its real database on this machine, and what is said where the library is missing."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from pydantic import BaseModel

from rlhf_core import train
from rlhf_core.errors import ConfigError
from rlhf_testing.contracts import LoggerContract
from rlhf_testing.contracts.logger import Logged
from rlhf_testing.runs import tiny_run

pytestmark = pytest.mark.usefixtures("no_plots")
here = pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed here: make env-clients")
missing = pytest.mark.skipif(find_spec("trackio") is not None, reason="trackio is installed here")


@pytest.fixture(autouse=True)
def own_database(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Its database in a folder of the test."""
    folder = tmp_path_factory.mktemp("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    if find_spec("trackio") is not None:
        monkeypatch.setattr("trackio.utils.TRACKIO_DIR", folder)
    yield folder


@here
@pytest.mark.filterwarnings("ignore")
class TestContract(LoggerContract):
    """A project on this machine."""

    plugin = "trackio"
    options = {"project": "contract"}

    @classmethod
    def logged(cls, run_folder: Path, config: BaseModel) -> Logged:
        """Of a step that was logged again, the value that was logged last."""
        from trackio.sqlite_storage import SQLiteStorage

        found: dict[str, dict[int, float]] = {}
        for line in SQLiteStorage.get_logs("contract", run_folder.name):
            for name in ("reward/mean", "eval/score", "kl/mean"):
                if name in line:
                    found.setdefault(name, {})[line["step"]] = line[name]
        return found


@here
@pytest.mark.filterwarnings("ignore")
def test_each_episode_has_a_table_of_samples(tmp_path: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    options = {"project": "tables", "samples": 3, "samples_every_episodes": 1}
    train(tiny_run({"train": {"episodes": 2}, "logging": {"trackio": options}}), output=tmp_path / "run")
    tables = [line["samples"]["_value"] for line in SQLiteStorage.get_logs("tables", "run") if "samples" in line]
    assert [[row["episode"] for row in table] for table in tables] == [[0, 0, 0], [1, 1, 1]]
    columns = ["episode", "prompt", "completion", "reward", "reward/exact-match", "length"]
    assert list(tables[0][0]) == columns


@missing
def test_selecting_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"logging\.trackio: .*needs trackio.*\n.*rlhf-logger-trackio\[trackio\]"):
        train(tiny_run({"logging": {"trackio": True}}), output=tmp_path / "run")
