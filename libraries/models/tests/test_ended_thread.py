"""Calls in a thread that ends."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from rlhf_models import call_in_ended_thread


def test_the_thread_has_ended_when_the_call_returns() -> None:
    threads: list[threading.Thread] = []

    def work() -> int:
        threads.append(threading.current_thread())
        return 3

    assert call_in_ended_thread(work) == 3
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()


def test_an_error_is_raised_to_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        call_in_ended_thread(lambda: 1 // 0)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists threads as Linux does")
def test_its_openmp_threads_have_ended_too() -> None:
    def own_threads() -> set[str]:
        return {each.name for each in Path("/proc/self/task").iterdir()}

    def work() -> set[str]:
        torch.set_num_threads(3)  # of this thread only
        torch.ones(1 << 20).add_(1)
        return own_threads()

    call_in_ended_thread(work)  # torch's other threads, which the process keeps
    before = own_threads()
    started = call_in_ended_thread(work) - before
    assert len(started) == 3
    deadline = time.monotonic() + 30  # the kernel removes them a moment later
    while started & own_threads():
        assert time.monotonic() < deadline, "its OpenMP threads still exist after 30 s"
        time.sleep(0.01)
