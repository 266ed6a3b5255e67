"""Threads that calls to a reward are made on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from running import PATIENCE_SECONDS

from rlhf_core.rewards.threads import CallThread


@pytest.fixture
def two_torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def product() -> float:
    square = torch.ones(700, 700)
    return float((square @ square)[0, 0])


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_reward_that_multiplies_leaves_no_openmp_worker_behind(two_torch_threads: None) -> None:
    """A second pool of them, kept, would put every parallel operation of the process to sleep and wake it again."""
    product()  # this thread's own pool
    before = set(os.listdir("/proc/self/task"))
    assert CallThread(product, "call").outcome.result(PATIENCE_SECONDS) == 700
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := set(os.listdir("/proc/self/task")) - before:
        assert time.monotonic() < deadline, f"{len(left)} threads are left after the call"
        time.sleep(0.01)
