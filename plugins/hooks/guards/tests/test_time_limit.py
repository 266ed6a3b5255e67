"""The hook plugin `time-limit`: when a run has too little time for another episode, and what is recorded."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import train
from rlhf_core.components import HookContext
from rlhf_core.errors import ConfigError, InterruptedRun
from rlhf_core.hookspecs import Action, FitInfo, Moment
from rlhf_core.runfolder import RunFolder
from rlhf_guards import time_limit
from rlhf_guards.time_limit import TimeLimit
from rlhf_testing.runs import tiny_run

pytestmark = pytest.mark.usefixtures("no_plots")


class Clock:
    """A clock that only tests advance, in place of the module `time`."""

    def __init__(self, now: float) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    monotonic = time


class Session:
    """A session of a run with one limit, in seconds."""

    def __init__(
        self, folder: Path, clock: Clock, limit: float, episodes: int = 100, background: bool = False, **options: Any
    ) -> None:
        run = {"train": {"max_hours": {"hours": limit / 3600, **options}}}
        if background:
            run["checkpoint"] = {"background": {"timeout_seconds": 1800.0}}
        self.limit = TimeLimit(Any, HookContext(run_folder=folder, run=run))
        self.clock = clock
        self.limit.rlhf_run_start()
        self.limit.rlhf_fit_start(FitInfo(algorithm="ppo", num_episodes=episodes))

    def episode(self, episode: int, seconds: float, save_seconds: float = 0.0, at: str = "episode") -> Action | None:
        self.limit.rlhf_episode_start()
        self.clock.now += seconds
        action = self.limit.rlhf_decide(Moment(at=at, step=1, episode=episode, metrics={}))  # type: ignore[arg-type]
        self.clock.now += save_seconds
        self.limit.rlhf_episode_end(None)
        return action


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock, at the time at which the run took its folder."""
    with RunFolder.take(tmp_path):
        pass
    clock = Clock((tmp_path / ".lock").stat().st_mtime)
    monkeypatch.setattr(time_limit, "time", clock)
    return clock


def test_the_longest_episode_and_twice_the_longest_checkpoint_must_fit(tmp_path: Path, clock: Clock) -> None:
    session = Session(tmp_path, clock, limit=100)
    clock.now += 10  # models are loaded
    assert session.episode(0, 20, save_seconds=5) is None  # at 35: 22 and 10 seconds are needed
    assert session.episode(1, 10) is None  # at 45
    assert session.episode(2, 20) is None  # at 65
    action = session.episode(3, 4)  # at 69
    assert action is not None and (action.kind, action.by) == ("interrupt", "train.max_hours")
    assert action.reason == (
        "0.0192 of 0.0278 hours are over, and another episode may take 0.00889 hours with its checkpoint"
    )
    assert session.episode(4, 1) is None  # it is decided already


@pytest.mark.parametrize(
    ("background", "seconds", "is_over"), [(True, 20, True), (True, 5000, False), (False, 20, False)]
)
def test_a_write_in_the_background_counts_too(
    tmp_path: Path, clock: Clock, background: bool, seconds: float, is_over: bool
) -> None:
    """The checkpoint of another session, which took 5000 seconds or was copied, does not count."""
    clock.now -= 100
    os.utime(tmp_path / ".lock", times=(clock.now, clock.now))
    session = Session(tmp_path, clock, limit=60, background=background)
    assert session.episode(0, 10, save_seconds=1) is None
    checkpoint = RunFolder(tmp_path).checkpoints / "step-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").touch()
    copied = checkpoint.stat().st_ctime - seconds
    os.utime(checkpoint / "state.json", times=(copied, copied))
    assert (session.episode(1, 10) is not None) is is_over  # at 21: 11 and 2 seconds are needed, and 40


def test_the_time_to_keep_may_be_set(tmp_path: Path, clock: Clock) -> None:
    session = Session(tmp_path, clock, limit=100, reserve_minutes=1.0)
    assert session.episode(0, 10, save_seconds=10) is None
    assert session.episode(1, 10) is not None  # at 30: 11 and 60 seconds are needed


def test_a_pause_ends_in_time(tmp_path: Path, clock: Clock) -> None:
    session = Session(tmp_path, clock, limit=100)
    assert session.episode(0, 30) is None
    assert session.episode(1, 40, at="update") is None
    assert session.episode(1, 1, at="paused") is not None


def test_the_last_episode_ends_by_itself(tmp_path: Path, clock: Clock) -> None:
    session = Session(tmp_path, clock, limit=10, episodes=1)
    assert session.episode(0, 30) is None


def limited(**train_options: Any) -> dict[str, Any]:
    sizes = {"episodes": 3, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
    return tiny_run({"train": {**sizes, **train_options}, "checkpoint": {"every_episodes": None}})


@pytest.mark.slow
def test_each_session_makes_an_episode_until_the_run_is_done(tmp_path: Path) -> None:
    """As a job that is put back in its queue: the limit is over at once, so that each session has one episode."""
    for episode in (1, 2):
        with pytest.raises(InterruptedRun, match=f"stopped after episode {episode} of 3"):
            train(limited(max_hours=1e-9), output=tmp_path, resume="auto")
        summary = RunFolder(tmp_path).read_json(tmp_path / "summary.json")
        assert (summary["status"], summary["stopped"]["by"]) == ("interrupted", "train.max_hours")
        assert "of 1e-09 hours are over" in summary["stopped"]["reason"]
        assert (tmp_path / "model").is_dir()
    result = train(limited(max_hours=1e-9), output=tmp_path, resume="auto")
    assert result is not None and result.summary["status"] == "done" and "stopped" not in result.summary
    straight = train(limited(), output=tmp_path / "straight")
    assert straight is not None
    rewards = [[line["reward/mean"] for line in each.metrics] for each in (result, straight)]
    assert rewards[0] == rewards[1]


class Signal:
    def rlhf_episode_start(self, episode: int) -> None:
        if episode == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


def test_a_signal_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRun, match="stopped after episode 2 of 3"):
        train(limited(), output=tmp_path, hooks=[Signal()])
    summary = RunFolder(tmp_path).read_json(tmp_path / "summary.json")
    assert (summary["status"], summary["stopped"]["by"]) == ("interrupted", "signal")
    assert "SIGUSR1" in summary["stopped"]["reason"]


def test_a_limit_without_its_plugin_is_refused(tmp_path: Path) -> None:
    run = limited(max_hours=1) | {"hooks": {"disable": ["Time_Limit"]}}
    with pytest.raises(ConfigError, match=r"train\.max_hours: has no effect, because hooks\.disable"):
        train(run, output=tmp_path / "run")
