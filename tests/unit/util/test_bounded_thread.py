"""A thread that runs out of memory as it begins does not hold up who starts it."""

import asyncio
import threading

import pytest

from rlhf_containment.processes.child import ChildProcess
from rlhf_core.rewards.threads import CallThread
from rlhf_core.util import bounded_thread
from rlhf_core.util.bounded_thread import BoundedThread
from rlhf_episodes.workers import Workers


def test_it_runs_as_any_thread():
    found = []
    thread = BoundedThread(found.append, "finder", (3,))
    thread.start()
    thread.join(10)
    assert found == [3] and thread.daemon and thread.name == "finder" and not thread.is_alive()


def print_on_a_worker():
    async def printed():
        return await Workers(asyncio.get_running_loop(), 1, "worker").submit(print)

    asyncio.run(printed())


STARTS = {
    "a thread": lambda: BoundedThread(print, "printer").start(),
    "a reward's call": lambda: CallThread(list, "call"),
    "a child process": lambda: ChildProcess("nothing"),
    "an environment's function": lambda: print_on_a_worker(),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_thread_that_ends_before_it_has_begun_is_an_error(monkeypatch, start):
    """As CPython's does that has no memory for its first frame."""
    for starter in ("_start_new_thread", "_start_joinable_thread"):
        monkeypatch.setattr(threading, starter, lambda *arguments, **options: 0, raising=False)
    monkeypatch.setattr(bounded_thread, "_WAIT_SECONDS", 0.001)
    with pytest.raises(MemoryError, match="ulimit -v"):
        start()
