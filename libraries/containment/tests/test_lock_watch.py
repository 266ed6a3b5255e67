"""The watchdog, and the hook that tells it of signals. What it ends: tests/unit/rewards/test_hostile.py."""

import os
import signal

from rlhf_containment.lock_watch import lock_watch
from rlhf_containment.signals import SignalWatch
from rlhf_core.distributed.interrupts import InterruptFlag


def test_a_watch_that_something_has_ended_is_started_anew():
    watch = lock_watch()
    watch._process.kill()
    watch._process.wait()
    hook = SignalWatch()
    with InterruptFlag() as flag:
        hook.rlhf_run_start()
        os.kill(os.getpid(), signal.SIGTERM)
        hook.rlhf_run_end()
        assert flag()
    assert lock_watch() is not watch


def test_handlers_are_put_back():
    hook = SignalWatch()
    with InterruptFlag():
        before = signal.getsignal(signal.SIGINT)
        hook.rlhf_run_start()
        assert signal.getsignal(signal.SIGINT) != before
        hook.rlhf_run_end()
        assert signal.getsignal(signal.SIGINT) == before
    hook.rlhf_run_end()
