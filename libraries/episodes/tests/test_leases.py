"""Resources that players of a process share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf_episodes.leases import Leases, lease_key


class Resource:
    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


def test_a_resource_is_built_for_the_first_user_and_closed_with_the_last() -> None:
    leases = Leases()
    first = leases.acquire("a", Resource)
    assert leases.acquire("a", Resource) is first and leases.acquire("b", Resource) is not first
    leases.release("a")
    assert first.num_closed == 0
    leases.release("a")
    assert first.num_closed == 1
    assert leases.acquire("a", Resource) is not first


def test_users_on_several_threads_get_one_resource() -> None:
    leases, barrier = Leases(), threading.Barrier(4)

    def use(_: int) -> Resource:
        barrier.wait(30)
        return leases.acquire("a", Resource)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(use, range(4)))
        assert len(set(map(id, found))) == 1
        list(threads.map(lambda _: leases.release("a"), range(4)))
    assert found[0].num_closed == 1


def test_a_failed_build_leaves_nothing() -> None:
    leases = Leases()

    def fails() -> Resource:
        raise OSError("no weights")

    with pytest.raises(OSError, match="no weights"):
        leases.acquire("a", fails)
    assert leases.acquire("a", Resource).num_closed == 0


def test_keys_differ_with_options_and_not_with_their_order() -> None:
    assert lease_key({"a": 1, "b": 2}, 3) == lease_key({"b": 2, "a": 1}, 3)
    assert lease_key({"a": 1}, 3) != lease_key({"a": 1}, 4)
