"""`DetachedReplayBuffer`, as its page describes it."""

import threading
import time

import pytest
import torch

from rlhf_core.batching import collate
from rlhf_core.errors import DeadlineError
from rlhf_core.types import BufferItem
from rlhf_ray import DetachedReplayBuffer


def item(number: int, length: int = 2) -> BufferItem:
    return BufferItem(
        sample_id=number,
        group_id=number,
        policy_version=0,
        prompt_ids=torch.full((3,), number),
        response_ids=torch.full((length,), number),
        action_mask=torch.ones(length, dtype=torch.bool),
        action_log_probs=torch.zeros(length),
        rewards={"reward": float(number)},
    )


def test_the_pages_example() -> None:
    buffer = DetachedReplayBuffer(sample_batch_size=8, limit=16)
    buffer.append(collate([item(n, 1 + n % 3) for n in range(8)]))
    assert buffer.get_length() == 1
    batch = buffer.sample(to_device="cpu")
    assert batch.sample_ids.tolist() == list(range(8))
    assert batch.sequences.shape == (8, 3 + 3)
    assert buffer.get_length() == 0


def test_samples_of_any_batch_size_become_batches_in_order_of_arrival() -> None:
    buffer = DetachedReplayBuffer(4)
    buffer.append(collate([item(0), item(1), item(2)]))
    assert buffer.get_length() == 0
    buffer.extend([item(3), item(4, 5), item(5), item(6), item(7), item(8)])
    assert buffer.get_length() == 2
    first, second = buffer.sample(worker_rank=1), buffer.sample()
    assert first.sample_ids.tolist() == [0, 1, 2, 3]
    assert first.num_actions == 2
    assert second.sample_ids.tolist() == [4, 5, 6, 7]
    assert second.num_actions == 5


def test_a_full_buffer_holds_up_whoever_appends_and_drops_nothing() -> None:
    buffer = DetachedReplayBuffer(2, limit=1, timeout_seconds=30.0)
    appender = threading.Thread(target=buffer.extend, args=([item(n) for n in range(8)],))
    appender.start()
    seen = []
    while len(seen) < 8:
        assert buffer.get_length() <= 1
        seen += buffer.sample().sample_ids.tolist()
    appender.join()
    assert seen == list(range(8))


def test_every_wait_ends_and_says_what_it_waited_for() -> None:
    buffer = DetachedReplayBuffer(2, limit=1, timeout_seconds=0.05)
    with pytest.raises(DeadlineError, match="0 of 2 entries"):
        buffer.sample()
    with pytest.raises(DeadlineError, match="room in the replay buffer"):
        buffer.extend([item(n) for n in range(4)])


def test_a_wait_ends_when_a_batch_comes() -> None:
    buffer = DetachedReplayBuffer(2, timeout_seconds=30.0)
    late = threading.Thread(target=lambda: (time.sleep(0.05), buffer.extend([item(0), item(1)])))
    late.start()
    assert buffer.sample().sample_ids.tolist() == [0, 1]
    late.join()


def test_clear_forgets_everything() -> None:
    buffer = DetachedReplayBuffer(2, limit=1)
    buffer.extend([item(0), item(1)])
    buffer.clear()
    assert buffer.get_length() == 0
    buffer.extend([item(2), item(3)])
    assert buffer.sample().sample_ids.tolist() == [2, 3]
