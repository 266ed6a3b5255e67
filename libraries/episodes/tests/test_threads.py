"""Threads that cannot begin, or that run out of memory, are errors and hold nobody up."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time

import pytest
from playing import Echo, play_one

from rlhf_core.errors import EpisodeError
from rlhf_core.util import bounded_thread
from rlhf_episodes.isolation import process as process_module
from rlhf_episodes.workers import Workers

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def no_thread_begins(monkeypatch):
    """As with CPython's that has no memory for its first frame."""
    monkeypatch.setattr(bounded_thread, "_WAIT_SECONDS", 0.001)

    def forbid():
        for starter in ("_start_new_thread", "_start_joinable_thread"):
            monkeypatch.setattr(threading, starter, lambda *arguments, **options: 0, raising=False)

    return forbid


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its loop is not closed
def test_a_session_whose_thread_cannot_begin_is_an_error(no_thread_begins):
    no_thread_begins()
    with pytest.raises(MemoryError, match="ulimit -v"):
        play_one(Echo)
    gc.collect()


def test_a_function_of_an_environment_for_which_no_thread_begins_fails(no_thread_begins, monkeypatch):
    add = Workers._add

    def forbidding(workers):
        no_thread_begins()
        add(workers)

    monkeypatch.setattr(Workers, "_add", forbidding)
    with pytest.raises(EpisodeError, match="raised MemoryError: a thread could not start"):
        play_one(Echo, timeout_seconds=600)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its tasks are not finished
def test_an_event_loop_that_runs_out_of_memory_ends_the_run_with_that():
    class Exhausts(Echo):
        async def step(self, reply):
            def fail():
                raise MemoryError("of the loop")

            asyncio.get_running_loop()._run_once = fail

    with pytest.raises(MemoryError, match="of the loop"):
        play_one(Exhausts, timeout_seconds=600)
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_child_does_not_wait_for_a_reader_of_its_output_that_ran_out_of_memory(monkeypatch):
    def fail(text):
        raise MemoryError

    monkeypatch.setattr(process_module, "_show", fail)
    output = process_module._OutputPipe("a child", print)
    try:
        with pytest.raises(BrokenPipeError):
            for _ in range(1000):
                os.write(output.write_end, bytes(1000))
                time.sleep(0.001)
    finally:
        os.close(output.write_end)
        output._thread.join(30)
