"""Whole batches, back-pressure, deadlines and closing."""

import threading
import time

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
    assert len(buffer) == len(everything) // size
    batches = [buffer.get(timeout_seconds=0) for _ in range(len(buffer))]
    assert all(len(batch) == size for batch in batches)
    rest = buffer.drain("done")
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
    assert buffer.drain("done") == [0, 1]


def test_a_short_buffer_says_what_the_consumer_waited_for():
    buffer = BatchBuffer(3)
    buffer.put([1], timeout_seconds=0)
    with pytest.raises(DeadlineError, match=r"a batch \(1 of 3 entries"):
        buffer.get(timeout_seconds=0.01)
    assert buffer.drain("done") == [1]


def test_draining_ends_waits_with_the_reason():
    buffer = BatchBuffer(2, limit=1)
    consumer, errors = in_thread(lambda: buffer.get(timeout_seconds=SOON))
    assert buffer.drain("it moves") == []
    consumer.join(SOON)
    assert "closed: it moves" in str(errors[0])
    for call in (lambda: buffer.put([1], timeout_seconds=0), lambda: buffer.get(timeout_seconds=0)):
        with pytest.raises(RlhfError, match="closed: it moves"):
            call()


def test_clear_empties_and_lets_producers_go_on():
    buffer = BatchBuffer(1, limit=1)
    buffer.put([1], timeout_seconds=0)
    producer, errors = in_thread(lambda: buffer.put([2], timeout_seconds=SOON))
    buffer.clear()
    producer.join(SOON)
    assert not errors
    assert buffer.drain("done") == [2]


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
    assert len(buffer) == 100


def test_what_is_drained_leaves_the_buffer_closed_and_may_start_another_above_its_limit():
    buffer = BatchBuffer(2, limit=1)
    producer, errors = in_thread(lambda: buffer.put(range(5), timeout_seconds=SOON))
    while len(buffer) < 1:
        time.sleep(0.01)
    moved = buffer.drain("it moves")
    producer.join(SOON)
    assert moved == [0, 1]
    assert [str(error) for error in errors] == ["replay buffer: the replay buffer is closed: it moves"]
    assert len(buffer) == 0
    other = BatchBuffer(1, limit=1, entries=moved)
    assert len(other) == 2
    with pytest.raises(DeadlineError, match="2 of 1"):
        other.put([2], timeout_seconds=0)


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="batch_size must be"):
        BatchBuffer(0)
