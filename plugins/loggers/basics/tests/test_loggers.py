"""The loggers of this distribution: core's contract, with what was written read back from the real files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from rlhf_core import train
from rlhf_core.components import HookContext
from rlhf_core.errors import ConfigError
from rlhf_core.plugins import requirements
from rlhf_loggers.config import WandbConfig
from rlhf_loggers.wandb import WandbLogger
from rlhf_pages import SampleTable
from rlhf_testing.contracts import LoggerContract
from rlhf_testing.contracts.logger import Logged
from rlhf_testing.runs import tiny_run

pytestmark = pytest.mark.usefixtures("no_plots")


class TestTensorBoard(LoggerContract):
    """Event files, as TensorBoard itself reads them."""

    plugin = "tensorboard"

    @classmethod
    def logged(cls, run_folder: Path, config: BaseModel) -> Logged:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        found: dict[str, dict[int, float]] = {}
        files = list((run_folder / "tensorboard").iterdir())
        assert len(files) == 3, "each session writes a file of its own, which says from where it replaces"
        for file in sorted(files, key=lambda path: path.stat().st_mtime_ns):
            for event in EventFileLoader(str(file)).Load():
                for value in event.summary.value:
                    found.setdefault(value.tag, {})[event.step] = value.tensor.float_val[0]
        return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_offline_has_one_run_in_the_folder(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install 'rlhf-loggers[wandb]'")
    context = HookContext(run_folder=tmp_path, run={"algorithm": {"name": "ppo"}})
    ids = []
    try:
        for step in (1, 2):
            logger = WandbLogger(WandbConfig(mode="offline"), context)
            logger.log(step, {"reward/mean": 0.25})
            logger.finish(False)
            ids.append((tmp_path / "wandb-id").read_text())
    finally:
        wandb.teardown()  # its service would run until the end of this process, and say then that it cannot be reached
    assert ids[0] == ids[1]
    content = b"".join(record.read_bytes() for record in (tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert b"reward/mean" in content


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_offline_has_a_table_of_samples_that_grows(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install 'rlhf-loggers[wandb]'")
    options = {"mode": "offline", "samples": 3, "samples_every_episodes": 1}
    try:
        train(tiny_run({"train": {"episodes": 2}, "logging": {"wandb": options}}), output=tmp_path / "run")
    finally:
        wandb.teardown()
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/files/media/table/samples_*.json"))
    tables = [json.loads(file.read_text()) for file in files]
    assert [len(table["data"]) for table in tables] == [3, 3]  # an increment per episode
    assert sorted(table["data"][0][0] for table in tables) == [0, 1]
    assert tables[0]["columns"] == ["episode", "prompt", "completion", "reward", "reward/exact-match", "length"]


class FakeTable:
    """Stand-in of `wandb.Table`."""

    def __init__(self, columns: list[str], log_mode: str) -> None:
        assert log_mode == "INCREMENTAL"
        self.columns = columns
        self.data: list[tuple[object, ...]] = []

    def add_data(self, *row: object) -> None:
        self.data.append(row)


class FakeWandb:
    """Stand-in of the module and its run."""

    Table = FakeTable
    id = "one"

    def __init__(self) -> None:
        self.logged: list[tuple[int, object, int]] = []

    def init(self, **options: object) -> FakeWandb:
        return self

    def log(self, values: dict[str, FakeTable], step: int) -> None:
        self.logged.append((step, values["samples"], len(values["samples"].data)))

    def finish(self, exit_code: int) -> None:
        """Do nothing."""


def test_wandb_adds_the_rows_of_an_episode_to_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setattr("rlhf_loggers.wandb.import_module", lambda name: fake)
    logger = WandbLogger(WandbConfig(), HookContext(run_folder=tmp_path, run={}))
    table = SampleTable(columns=["episode", "completion"], rows=[(0, "a"), (0, "b")])
    logger.log_samples(4, table)
    logger.log_samples(8, table)
    logger.log_samples(9, SampleTable(columns=["episode", "completion", "reward/new"], rows=[(2, "c", 1.0)]))
    logger.finish(False)
    logger.log_samples(9, table)  # after a rollback, in a table of the reopened run
    assert [(step, number) for step, _, number in fake.logged] == [(4, 2), (8, 4), (9, 1), (9, 2)]
    assert len({id(each) for _, each, _ in fake.logged}) == 3


def test_secrets_of_the_run_file_do_not_reach_a_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[HookContext] = []
    monkeypatch.setattr(
        "rlhf_loggers.tensorboard.TensorBoardLogger", lambda config, context: seen.append(context) or _Nothing()
    )
    (tmp_path / "paid.py").write_text("def paid(rollouts, *, api_key: str = ''): return [1.0] * len(rollouts)")
    reward = {"name": f"{tmp_path / 'paid.py'}:paid", "api_key": "hidden-value"}
    train(
        tiny_run({"rewards": [reward], "logging": {"tensorboard": True}, "train": {"episodes": 1}}),
        output=tmp_path / "run",
    )
    assert "hidden-value" not in str(seen[0].run) and "paid.py" in str(seen[0].run)


class _Nothing:
    def log(self, step: int, values: object) -> None:
        """Take nothing."""

    def finish(self, failed: bool) -> None:
        """Close nothing."""


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_library_says_what_to_install(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = requirements.find_spec
    monkeypatch.setattr(requirements, "find_spec", lambda each: None if each == name else there(each))
    with pytest.raises(ConfigError, match=rf"logging\.{name}: .*not installed here\n.*rlhf-loggers\[{name}\]"):
        train(tiny_run({"logging": {name: True}}), output=tmp_path / "run")
    result = train(tiny_run({"logging": {}, "train": {"episodes": 1}}), output=tmp_path / "run")
    assert result is not None and (result.run_folder / "tensorboard").exists() is False


@pytest.mark.parametrize(
    ("logging", "says"),
    [
        ({"tensorbord": True}, r'logging\.tensorbord: no logger "tensorbord" is installed; did you mean "tensorboard"'),
        ({"tensorboard": {"foldr": "x"}}, r'logging\.tensorboard\.foldr: unknown key; did you mean "folder"'),
        ({"sample": "none"}, r'logging\.sample: .*did you mean "samples"'),
    ],
)
def test_wrong_loggers_are_said_where_they_stand(logging: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        train(tiny_run({"logging": logging}), output=tmp_path / "run")
