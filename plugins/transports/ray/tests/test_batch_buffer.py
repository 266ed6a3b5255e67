"""Whole batches, back-pressure and deadlines."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.errors import DeadlineError, RlhfError
from rlhf_ray.batch_buffer import BatchBuffer

SOON = 20.0


def in_thread(work):
    """Run `work`, and give its error back."""
    errors = []

    def run():
        try:
            work()
        except RlhfError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


@given(st.integers(1, 5), st.lists(st.lists(st.integers(), max_size=6), max_size=8))
def test_entries_come_out_in_order_in_whole_batches(size, puts):
    buffer = BatchBuffer(size)
    for entries in puts:
        buffer.put(entries, timeout_seconds=0)
    everything = [entry for entries in puts for entry in entries]
    assert buffer.num_batches() == len(everything) // size
    batches = [buffer.get(timeout_seconds=0) for _ in range(buffer.num_batches())]
    assert all(len(batch) == size for batch in batches)
    rest = list(buffer._entries)
    assert [e for batch in batches for e in batch] + rest == everything
    assert len(rest) == len(everything) % size


def test_a_full_buffer_blocks_its_producer_and_drops_nothing():
    buffer = BatchBuffer(2, limit=2)
    producer, errors = in_thread(lambda: buffer.put(range(10), timeout_seconds=SOON))
    taken = [buffer.get(timeout_seconds=SOON) for _ in range(5)]
    producer.join(SOON)
    assert taken == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert not errors


def test_a_full_buffer_says_what_the_producer_waited_for():
    buffer = BatchBuffer(2, limit=1)
    with pytest.raises(DeadlineError, match=r"room in the replay buffer \(1 of 1 batches wait\)"):
        buffer.put(range(3), timeout_seconds=0.01)
    assert list(buffer._entries) == [0, 1]


def test_a_short_buffer_says_what_the_consumer_waited_for():
    buffer = BatchBuffer(3)
    buffer.put([1], timeout_seconds=0)
    with pytest.raises(DeadlineError, match=r"a batch \(1 of 3 entries"):
        buffer.get(timeout_seconds=0.01)
    assert list(buffer._entries) == [1]


def test_clear_empties_and_lets_producers_go_on():
    buffer = BatchBuffer(1, limit=1)
    buffer.put([1], timeout_seconds=0)
    producer, errors = in_thread(lambda: buffer.put([2], timeout_seconds=SOON))
    buffer.clear()
    producer.join(SOON)
    assert not errors
    assert list(buffer._entries) == [2]


def test_many_producers_and_consumers_lose_and_double_nothing():
    buffer = BatchBuffer(4, limit=2)
    taken, lock = [], threading.Lock()

    def consume():
        for _ in range(10):
            batch = buffer.get(timeout_seconds=SOON)
            with lock:
                taken.extend(batch)

    threads = [in_thread(lambda n=n: buffer.put(range(n * 20, n * 20 + 20), timeout_seconds=SOON)) for n in range(4)]
    threads += [in_thread(consume) for _ in range(2)]
    for thread, errors in threads:
        thread.join(SOON)
        assert not errors
    assert sorted(taken) == list(range(80))


def test_a_negative_limit_is_none():
    buffer = BatchBuffer(1, limit=-1)
    buffer.put(range(100), timeout_seconds=0)
    assert buffer.num_batches() == 100


def test_what_is_given_back_comes_first_and_may_exceed_the_limit():
    buffer = BatchBuffer(2, limit=1)
    buffer.put([0, 1], timeout_seconds=0)
    taken = buffer.get(timeout_seconds=0)
    buffer.put([2, 3], timeout_seconds=0)
    buffer.give_back(taken)
    assert buffer.num_batches() == 2
    with pytest.raises(DeadlineError, match="2 of 1"):
        buffer.put([4], timeout_seconds=0)
    assert buffer.get(timeout_seconds=0) == [0, 1]
