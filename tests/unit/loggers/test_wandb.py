from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.errors import UserInputError
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.hookspecs import FitInfo
from rlhf_core.loggers import WandbLogger


def log(folder: Path, step: int) -> str:
    relay = HookRelay()
    relay.register(WandbLogger(mode="offline"))
    config = {"algorithm": {"name": "ppo"}, "rewards": [{"api_key": "hidden-value"}]}
    with (
        relay.span("run", run_folder=folder, config=config),
        relay.span("fit", info=FitInfo(algorithm="ppo", num_episodes=1)),
    ):
        relay.fire("metrics", line={"step": step, "reward/mean": 0.25})
    return (folder / "wandb-id").read_text()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_offline_runs_land_in_the_folder_under_one_id_and_without_secrets(tmp_path: Path):
    wandb = pytest.importorskip("wandb")
    try:
        assert log(tmp_path, 1) == log(tmp_path, 2)
    finally:
        wandb.teardown()  # its service would run until the end of this process, and say then that it cannot be reached
    records = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert records
    content = b"".join(record.read_bytes() for record in records)
    assert b"reward/mean" in content and b"hidden-value" not in content


def test_a_missing_package_says_what_to_type(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlhf_core.loggers.wandb.find_spec", lambda name: None)
    with pytest.raises(UserInputError, match=r"rlhf-core\[wandb\]"):
        WandbLogger()
