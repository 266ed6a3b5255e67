"""What a test started ends with it, whatever happened to the test."""

import os
import signal
import subprocess
import sys
import time

import pytest
from running import MARK, PATIENCE_SECONDS, Forked, ended, kill, marked, rlhf, wait_until

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def start_sleepers(leave):
    """One below in a session of its own, whose parent may go before it."""
    subprocess.Popen(SLEEP, start_new_session=True)
    if not leave:
        time.sleep(600)


@pytest.mark.parametrize("leave", [False, True])
def test_everything_below_it_ends_with_it(leave):
    started = Forked(start_sleepers, leave)
    with ended(started):
        wait_until(lambda: marked(started.mark), "the one below")
        if leave:
            started.finish()
            assert started.returncode == 0
    assert not started.processes()
    assert (started.returncode == 0) is leave


def test_a_test_that_is_cut_ends_what_it_started():
    """As pytest's limit of time cuts it: by an exception from a signal handler, in the middle of a wait."""

    def cut(number, frame):
        pytest.fail("cut")

    started = Forked(start_sleepers, False)
    before = signal.signal(signal.SIGUSR1, cut)
    try:
        with pytest.raises(pytest.fail.Exception, match="cut"), ended(started):
            wait_until(lambda: marked(started.mark), "the one below")
            os.kill(os.getpid(), signal.SIGUSR1)
            started.finish()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not started.processes()
    assert started.returncode == -signal.SIGKILL


def test_a_command_says_and_ends_as_it_does_in_a_shell(tmp_path):
    wrong = rlhf("plugin", "list", env={**os.environ, "COLUMNS": "200"})
    with ended(wrong):
        out, err = wrong.finish()
    assert (wrong.returncode, out) == (2, "")
    assert 'did you mean "plugins"?' in err


def test_what_no_test_ends_is_found():
    """By the mark of this test process, at its end: see the root's conftest.py."""
    left = subprocess.Popen(SLEEP)
    try:
        assert left.pid in [process.pid for process in marked(os.environ[MARK])]
    finally:
        kill(lambda: [process for process in marked(os.environ[MARK]) if process.pid == left.pid])
    assert left.wait(PATIENCE_SECONDS) == -signal.SIGKILL
