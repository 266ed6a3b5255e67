from __future__ import annotations

import time
from pathlib import Path

import pytest

from rlhf_core.errors import UserInputError
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.hookspecs import FitInfo
from rlhf_core.loggers import TensorBoardLogger


def log(folder: Path, steps: range) -> None:
    relay = HookRelay()
    relay.register(TensorBoardLogger())
    info = FitInfo(algorithm="ppo", num_episodes=1)
    with relay.span("run", run_folder=folder, config={}), relay.span("fit", info=info):
        with relay.span("episode", episode=0):
            pass
        for step in steps:
            line = {"step": step, "reward/mean": step / 10, "loss/policy": None, "nonfinite": {"loss/policy": "nan"}}
            relay.fire("metrics", line=line)


def test_numbers_arrive_under_their_names_and_a_resume_replaces(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log(tmp_path, range(1, 5))
    time.sleep(1.1)  # files are read in the order of their names, which hold seconds: a resume is a process of its own
    log(tmp_path, range(3, 6))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(event.step, round(event.value, 4)) for event in events.Scalars("reward/mean")] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 0.4),
        (5, 0.5),
    ]


def test_a_missing_package_says_what_to_type(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlhf_core.loggers.tensorboard.find_spec", lambda name: None)
    with pytest.raises(UserInputError, match=r"rlhf-core\[tensorboard\]"):
        TensorBoardLogger()
