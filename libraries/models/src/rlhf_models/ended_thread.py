"""Calls in a thread that ends, so that only one thread of the process has OpenMP threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def call_in_ended_thread(function: Callable[[], T]) -> T:
    """Call a function in a new thread, wait until the thread has ended, and return the function's result.

    torch computes on a CPU with OpenMP, which keeps a pool of threads for each thread that has computed. If the pools
    have more threads than the machine has cores, waiting for them takes system calls instead of spinning, and a model
    of many small operations takes up to 1.5 times as long. A program that loads a model and then computes in another
    thread calls this to load it. Do not load a model on a GPU other than the first like this: the current device
    belongs to a thread.

    Args:
        function: Loads a model, for example.

    Returns:
        The result of `function`. Its exceptions are raised.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="load") as executor:
        return executor.submit(function).result()
