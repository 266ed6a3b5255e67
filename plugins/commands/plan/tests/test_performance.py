from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_core.components import HookContext
from rlhf_core.hooks import HookRelay
from rlhf_core.hookspecs import FitInfo
from rlhf_core.plugins import load
from rlhf_core.runfolder import RunFolder
from rlhf_plan.performance import PerformanceEvaluator, describe

EPISODE = {
    "time/rollout_s": 2.0,
    "time/train_s": 4.0,
    "time/sync_s": 1.0,
    "tokens_per_second/rollout": 100.0,
    "tokens_per_second/train": 500.0,
    "memory/peak_bytes": 7,
}


def run(relay: HookRelay, info: FitInfo, episodes: int, run_folder: Path) -> None:
    with relay.span("run", run_folder=run_folder, config={}), relay.span("fit", info=info):
        for episode in range(info.first_episode, info.first_episode + episodes):
            with relay.span("episode", episode=episode) as span:
                span.set("metrics", EPISODE)


def registered(folder: Path) -> HookRelay:
    selected = load("hooks", "performance")
    relay = HookRelay()
    relay.register(selected.build(selected.component.config(), HookContext(run_folder=folder)))
    return relay


def test_figures_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    clock = iter(10.0 * tick for tick in range(8))  # every episode takes ten seconds
    monkeypatch.setattr("rlhf_plan.performance.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    caplog.set_level(logging.INFO, "rlhf.performance")
    RunFolder(tmp_path).config.write_text("model: {path: m}")
    relay = registered(tmp_path)
    info = FitInfo(
        algorithm="ppo",
        num_episodes=9,
        first_episode=5,
        samples_per_episode=64,
        num_parameters={"policy": 1000, "critic": 500, "reference": 1000},
    )
    run(relay, info, 3, tmp_path)
    figures = json.loads((tmp_path / "performance.json").read_text())
    assert figures["episodes"] == 3
    assert figures["samples_per_second"] == pytest.approx(6.4)
    assert figures["tokens_per_second"] == {"rollout": 100.0, "train": 500.0}
    assert figures["time_share"] == {
        "rollout": pytest.approx(0.2),
        "reward": 0.0,
        "train": pytest.approx(0.4),
        "sync": pytest.approx(0.1),
        "idle": pytest.approx(0.3),
    }
    # 2·2500·100 and 6·1500·500 operations a second
    assert figures["tflop_per_second"] == {"rollout": pytest.approx(5e-7), "train": pytest.approx(4.5e-6)}
    assert figures["peak_memory_bytes"] == 7
    assert caplog.messages == [describe(figures)]
    assert "idle 30%" in caplog.messages[0]


def test_nothing_is_said_of_no_episode(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run(registered(tmp_path), FitInfo(algorithm="ppo", num_episodes=0), 0, tmp_path)
    assert list(tmp_path.iterdir()) == [] and not caplog.messages


def test_outside_a_run_folder_it_writes_nothing(tmp_path: Path):
    run(registered(tmp_path), FitInfo(algorithm="ppo", num_episodes=1), 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_episode_does_not_count(tmp_path: Path):
    evaluator, relay = PerformanceEvaluator(tmp_path), HookRelay()
    relay.register(evaluator)
    with pytest.raises(ValueError), relay.span("episode", episode=0):
        raise ValueError
    assert evaluator.figures() == {}


def test_waiting_for_environments_is_not_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr("rlhf_plan.performance.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    evaluator, relay = PerformanceEvaluator(tmp_path), HookRelay()
    relay.register(evaluator)
    with relay.span("episode", episode=0) as span:
        span.set("metrics", {**EPISODE, "time/environment_s": 2.5})
    shares = evaluator.figures()["time_share"]
    assert (shares["environment"], shares["idle"]) == (pytest.approx(0.25), pytest.approx(0.05))
