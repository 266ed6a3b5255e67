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

from rlhf_core.errors import InterruptedRun, LostRankError, RlhfError
from rlhf_strategies.ranks import RankGroup

SLEEPS = "import sys, time; print(flush=True); sys.stdin.readline(); sys.exit(int(sys.argv[1]))"


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Two ranks that sleep until a line tells them to exit; `started(timeout_seconds, code)`."""
    monkeypatch.setattr("rlhf_strategies.ranks._GRACE_SECONDS", 0.0)
    monkeypatch.setattr("rlhf_strategies.ranks._AFTER_SUCCESS_SECONDS", 600.0)
    made = []

    def start(timeout_seconds=600.0, code=0):
        def process(command, environment):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = subprocess.Popen([sys.executable, "-c", SLEEPS, str(code)], env=environment, **pipes)
            process.stdout.readline()
            return process

        monkeypatch.setattr("rlhf_strategies.ranks._start_process", process)
        ranks = RankGroup(tmp_path / "request.json", timeout_seconds)
        made.append(ranks)
        ranks.start(2, os.environ)
        return ranks, ranks._processes

    yield start
    for ranks in made:
        with ranks:
            pass
        for process in ranks._processes:
            assert process.poll() is not None
            process.stdin.close()
            process.stdout.close()


def ends(process, code=0):
    process.stdin.close()
    assert process.wait(PATIENCE_SECONDS) == code


def test_a_stopped_rank_that_was_given_up_is_killed(started, tmp_path):
    ranks, (first, second) = started()
    second.send_signal(signal.SIGSTOP)
    record = {"time": 1.0, "rank": 0, "kind": "LostRankError", "message": "rank 1 is gone", "where": None, "hint": None}
    (tmp_path / "error-0.json").write_text(json.dumps({**record, "lost_ranks": [1]}))
    ranks.poll()
    assert second.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert first.poll() is None
    ends(first)
    with pytest.raises(LostRankError, match="rank 1 is gone"):
        ranks.raise_failure(interrupted=False)


def test_who_does_not_follow_a_dead_rank_within_the_deadline_is_killed(started):
    ranks, (first, second) = started(timeout_seconds=0.2)
    second.send_signal(signal.SIGSTOP)
    first.kill()
    first.wait(PATIENCE_SECONDS)
    ranks.poll()
    assert second.poll() is None
    time.sleep(0.3)
    ranks.wait()
    assert second.returncode < 0
    with pytest.raises(RlhfError, match=rf"rank 0 \(pid {first.pid}\) was ended by SIGKILL"):
        ranks.raise_failure(interrupted=False)


def test_the_others_are_asked_to_end_when_one_has_failed(started):
    ranks, (first, second) = started(code=3)
    ends(first, 3)
    ranks.wait()
    assert second.returncode == -signal.SIGTERM
    with pytest.raises(RlhfError, match="rank 0 .* ended with exit code 3"):
        ranks.raise_failure(interrupted=False)
    with pytest.raises(KeyboardInterrupt):
        ranks.raise_failure(interrupted=True)


@pytest.mark.parametrize("code", [0, InterruptedRun.exit_code])
def test_a_rank_has_longer_where_the_others_ended_in_order(started, code):
    ranks, (first, second) = started(timeout_seconds=0.0, code=code)
    ends(second, code)
    ranks.poll()
    time.sleep(0.1)
    ranks.poll()
    assert first.poll() is None


def test_none_is_left_at_the_end(started, monkeypatch):
    ranks, (first, second) = started()
    monkeypatch.setattr("rlhf_strategies.ranks._GRACE_SECONDS", 2.0)
    second.send_signal(signal.SIGSTOP)
    with pytest.raises(KeyboardInterrupt), ranks:
        raise KeyboardInterrupt
    assert first.returncode == -signal.SIGTERM and second.returncode < 0
