from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_core.runfolder.metrics import PhaseTimer


def test_phases_are_exclusive_and_start_anew(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 1.0, 4.0, 6.0, 10.0, 12.0])
    monkeypatch.setattr("rlhf_core.runfolder.metrics.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    timer = PhaseTimer()
    with timer.phase("rollout"), timer.phase("reward"):  # 0 .. 6, of which 1 .. 4 is the reward's
        pass
    with timer.phase("train"):  # 10 .. 12
        pass
    timer.add("train", 0.5)
    assert timer.seconds("rollout") == 3.0
    assert timer.take() == {"time/rollout_s": 3.0, "time/reward_s": 3.0, "time/train_s": 2.5}
    assert timer.take() == {}
    assert next(clock, None) is None


def test_an_open_phase_cannot_be_taken():
    timer = PhaseTimer()
    with timer.phase("train"), pytest.raises(RuntimeError, match="train"):
        timer.take()
