"""Training processes that are stopped, or stay behind, are ended by the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from running import PATIENCE_SECONDS

from rlhf_strategies.rank_watch import RankWatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the watch reads /proc")


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Two processes that would sleep for ever, started as the launcher starts them."""
    monkeypatch.setattr("rlhf_strategies.rank_watch._GRACE_SECONDS", 0.0)
    monkeypatch.setattr("rlhf_strategies.rank_watch._AFTER_SUCCESS_SECONDS", 600.0)
    request = tmp_path / "request.json"
    code = "import time; print(flush=True); time.sleep(600)"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(request)],
            env={**os.environ, "RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def end(process):
    process.kill()
    process.wait(PATIENCE_SECONDS)


def test_a_stopped_rank_that_was_given_up_is_killed(ranks, tmp_path):
    watch = RankWatch(tmp_path / "request.json", timeout_seconds=600)
    ranks[1].send_signal(signal.SIGSTOP)
    watch.look()
    (tmp_path / "error-0.json").write_text(json.dumps({"lost_ranks": [1]}))
    watch.look()
    assert ranks[1].wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert ranks[0].poll() is None


def test_who_does_not_follow_a_dead_rank_within_the_deadline_is_killed(ranks, tmp_path):
    watch = RankWatch(tmp_path / "request.json", timeout_seconds=0.2)
    watch.look()
    end(ranks[0])
    watch.look()
    assert ranks[1].poll() is None
    time.sleep(0.3)
    watch.look()
    assert ranks[1].wait(PATIENCE_SECONDS) == -signal.SIGKILL


def test_a_rank_has_longer_where_the_others_ended_in_order(ranks, tmp_path):
    watch = RankWatch(tmp_path / "request.json", timeout_seconds=0.0)
    watch.look()
    (tmp_path / "done-1").touch()
    end(ranks[1])
    watch.look()
    time.sleep(0.1)
    watch.look()
    assert ranks[0].poll() is None
