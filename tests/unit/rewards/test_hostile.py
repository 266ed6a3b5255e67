"""Rewards that ignore deadlines and signals, and what a model writes to make them."""

import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import faulty_rewards as faulty
import pytest
from running import PATIENCE_SECONDS

from rlhf_core.errors import RewardError

HERE = Path(faulty.__file__).parent
RUN = """
import sys
sys.path.append({here!r})
import faulty_rewards as faulty
from rlhf_containment import lock_watch
from rlhf_containment.signals import signal_watch
from rlhf_core.config import RewardCallOptions
from rlhf_core.distributed.interrupts import InterruptFlag
from rlhf_core.rewards import RewardScorer, RewardSpec
lock_watch.GRACE_SECONDS = 0.5
recipe = faulty.Recipe(faulty.__file__, {name!r})
policy = RewardCallOptions(timeout_seconds={timeout}, isolate={isolate})
scorer = RewardScorer([RewardSpec(name="r", function=recipe(), recipe=recipe, plugin="dist 1.0", call_options=policy)])
with InterruptFlag():
    signal_watch.rlhf_run_start()
    print("started", flush=True)
    scorer.score([faulty.make_rollout(0)])
"""


@pytest.fixture
def started():
    with ExitStack() as stack:

        def start(name, *, timeout, isolate=False):
            source = RUN.format(here=str(HERE), name=name, timeout=timeout, isolate=isolate)
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", source], text=True, **pipes))
            stack.callback(process.kill)
            assert process.stdout.readline() == "started\n", process.communicate(timeout=PATIENCE_SECONDS)
            return process

        yield start


def test_a_deadline_holds_where_pythons_lock_is_held(started):
    process = started("never_lets_go_of_the_lock", timeout=0.5)
    _, said = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == -signal.SIGKILL
    assert 'reward "r": dist 1.0: gave no answer within 0.5 s and holds the GIL' in said
    assert "isolate: true" in said
    assert_stack_of_the_hanging_line(said.partition("isolate: true")[2])


@pytest.mark.slow
def test_two_signals_end_the_run_where_pythons_lock_is_held(started):
    process = started("never_lets_go_of_the_lock", timeout=600)
    said = end_by_two_signals(process)
    assert process.returncode == -signal.SIGKILL
    assert_stack_of_the_hanging_line(said)


def assert_stack_of_the_hanging_line(said):
    line = faulty.never_lets_go_of_the_lock.__code__.co_firstlineno + 1
    assert "Thread 0x" in said
    assert re.search(rf'File ".*faulty_rewards.py", line {line} in never_lets_go_of_the_lock\n', said)


@pytest.mark.slow
def test_two_signals_end_the_run_where_a_reward_hangs(started):
    process = started("hangs", timeout=600)
    said = end_by_two_signals(process)
    assert process.returncode in (-signal.SIGINT, 1) and "KeyboardInterrupt" in said


def test_signals_that_were_heard_end_nothing():
    source = """
import os, signal, time
from rlhf_containment import lock_watch
from rlhf_containment.signals import signal_watch
from rlhf_core.distributed.interrupts import InterruptFlag
lock_watch.GRACE_SECONDS = 0.2
for number in (signal.SIGINT, signal.SIGTERM) * 20:
    try:
        with InterruptFlag():
            signal_watch.rlhf_run_start()
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
    except KeyboardInterrupt:
        signal_watch.rlhf_run_end()
time.sleep(1.0)
"""
    assert (
        subprocess.run([sys.executable, "-c", source], timeout=PATIENCE_SECONDS, stderr=subprocess.DEVNULL).returncode
        == 0
    )


def end_by_two_signals(process):
    for _ in range(2):
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
    return process.communicate(timeout=PATIENCE_SECONDS)[1]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread watches, which needs Python's lock")
def test_an_isolated_reward_that_holds_pythons_lock_ends_with_a_killed_run(started):
    process = started("says_who_and_never_lets_go_of_the_lock", timeout=600, isolate=True)
    pid = int(process.stderr.readline())
    process.kill()
    process.wait(PATIENCE_SECONDS)
    for _ in range(300):
        if not Path(f"/proc/{pid}").exists() or "\tZ" in Path(f"/proc/{pid}/status").read_text().split("State:")[1][:3]:
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} of the reward goes on")


@pytest.mark.parametrize("name", ["interrupts", "interrupts_async"])
@pytest.mark.parametrize("isolate", [False, True])
def test_a_keyboard_interrupt_in_a_reward_is_its_failure(score, rollouts, name, isolate):
    recipe = faulty.Recipe(faulty.__file__, name)
    with pytest.raises(RewardError, match="raised KeyboardInterrupt: from a reward"):
        score({"r": recipe()}, rollouts, recipe=recipe, isolate=isolate)


@pytest.mark.slow
def test_a_batch_that_a_hanging_process_does_not_take_is_scored_in_a_new_one(score):
    large = [faulty.make_rollout(index, "x" * 10**6) for index in range(4)]
    recipe = faulty.Recipe(faulty.__file__, "answers_a_batch_and_then_holds_the_lock")
    _, scorer = score({"r": None}, large, recipe=recipe, isolate=True, timeout_seconds=2.0)
    time.sleep(0.5)
    with pytest.raises(RewardError, match="did not take its input within 2 s"):
        scorer.score(large[:1])
    assert scorer.score(large) == [{"r": 1.0}] * 4
    time.sleep(0.5)
    assert scorer.score(large) == [{"r": 1.0}] * 4


def test_a_close_that_hangs_is_left_behind(score, rollouts, monkeypatch):
    monkeypatch.setattr("rlhf_core.rewards.runner._CLOSE_SECONDS", 0.2)
    _, scorer = score(faulty.HangsAtClose(), rollouts)
    with pytest.raises(RewardError, match='reward "r": dist 1.0: its close gave no answer within 0.2 s'):
        scorer.close()
