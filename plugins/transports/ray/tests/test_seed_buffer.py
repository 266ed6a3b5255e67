"""`DetachedReplayBuffer`, as its page describes it."""

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import ray.cloudpickle
import torch
from running import PATIENCE_SECONDS

from rlhf_core.batching import collate
from rlhf_core.errors import DeadlineError, UserInputError
from rlhf_core.types import BufferItem
from rlhf_ray import DetachedReplayBuffer

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module

WAIT = PATIENCE_SECONDS


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


@pytest.mark.parametrize("device", ["cuda:9", "meta:nonsense"])
def test_a_batch_that_cannot_be_moved_is_not_lost(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("the device is full")

    buffer = DetachedReplayBuffer(2, limit=1)
    buffer.extend([item(0), item(1)])
    monkeypatch.setattr("rlhf_ray.replay_buffer.moved", out_of_memory)
    with pytest.raises(RuntimeError):
        buffer.sample(to_device=device)
    monkeypatch.undo()
    assert buffer.get_length() == 1
    assert buffer.sample().sample_ids.tolist() == [0, 1]


def test_a_negative_limit_is_none() -> None:
    buffer = DetachedReplayBuffer(2, limit=-1, timeout_seconds=0.05)
    buffer.extend([item(n) for n in range(10)])
    assert buffer.get_length() == 5


@ray.remote(num_cpus=0)
class Worker:
    """Another process, which a buffer is handed to."""

    def call(self, buffer: DetachedReplayBuffer, method: str, *arguments: Any) -> Any:
        return getattr(buffer, method)(*arguments)

    def hold(self, held: list[Any]) -> list[Any]:
        """What it was given, with the references in it resolved."""
        return [ray.get(each) if isinstance(each, ray.ObjectRef) else each for each in held]


@pytest.fixture(scope="module")
def workers(local_ray: None) -> Iterator[list[Any]]:
    started = [Worker.remote() for _ in range(2)]
    yield started
    for worker in started:
        ray.kill(worker)


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=WAIT)


def test_workers_share_the_buffer_they_are_handed(workers: list[Any]) -> None:
    """What two of them append forms batches, what was there before comes first, and a full buffer holds them up."""
    buffer = DetachedReplayBuffer(2, limit=2, timeout_seconds=WAIT)
    buffer.extend([item(0), item(1), item(2)])
    first, second = workers
    get(second.call.remote(buffer, "append", collate([item(3)])))
    assert buffer.get_length() == get(first.call.remote(buffer, "get_length")) == 2
    full = first.call.remote(buffer, "extend", [item(n) for n in range(4, 8)])
    assert ray.wait([full], timeout=0.2)[0] == []
    assert get(second.call.remote(buffer, "sample")).sample_ids.tolist() == [0, 1]
    assert buffer.sample().sample_ids.tolist() == [2, 3]
    get(full)
    assert [buffer.sample().sample_ids.tolist() for _ in range(2)] == [[4, 5], [6, 7]]
    buffer.extend([item(8), item(9)])
    get(second.call.remote(buffer, "clear"))
    assert buffer.get_length() == 0


def test_a_shared_buffer_gets_back_what_cannot_be_moved(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("the device is full")

    buffer = DetachedReplayBuffer(2, limit=2)
    get(workers[0].call.remote(buffer, "extend", [item(n) for n in range(4)]))
    monkeypatch.setattr("rlhf_ray.replay_buffer.moved", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        buffer.sample()
    monkeypatch.undo()
    assert [buffer.sample().sample_ids.tolist() for _ in range(2)] == [[0, 1], [2, 3]]


def test_what_is_handed_over_beside_it_arrives_too(workers: list[Any]) -> None:
    buffer = DetachedReplayBuffer(1, timeout_seconds=WAIT)
    before, same, after = get(workers[0].hold.remote([ray.put("before"), buffer, ray.put("after")]))
    assert (before, after) == ("before", "after")
    same.extend([item(5)])
    assert buffer.sample().sample_ids.tolist() == [5]


@pytest.mark.slow
def test_a_shared_buffers_waits_end_and_say_what_they_waited_for(workers: list[Any]) -> None:
    buffer = DetachedReplayBuffer(2, limit=1, timeout_seconds=0.2)
    with pytest.raises(DeadlineError, match="0 of 2 entries"):
        buffer.sample()
    with pytest.raises(DeadlineError, match="room in the replay buffer"):
        get(workers[0].call.remote(buffer, "extend", [item(n) for n in range(4)]))
    assert buffer.get_length() == 1


def shorten_calls(worker: Any) -> None:
    from rlhf_ray import replay_buffer

    replay_buffer._CALL_SECONDS = 0.1


@pytest.mark.slow
def test_no_batch_is_taken_for_one_that_died_waiting(workers: list[Any]) -> None:
    buffer = DetachedReplayBuffer(1, timeout_seconds=WAIT)
    waiting = Worker.remote()
    get(waiting.__ray_call__.remote(shorten_calls))
    assert get(waiting.call.remote(buffer, "get_length")) == 0
    waiting.call.remote(buffer, "sample")
    time.sleep(0.3)  # it waits
    ray.kill(waiting)
    time.sleep(0.5)  # the last of its calls is over
    buffer.extend([item(1)])
    assert buffer.sample(timeout_seconds=10.0).sample_ids.tolist() == [1]


def test_one_that_was_made_without_ray_is_handed_to_nobody() -> None:
    buffer = DetachedReplayBuffer(1, is_shared=False)
    with pytest.raises(UserInputError, match=r"ray\.init"):
        ray.cloudpickle.dumps(buffer)
    buffer.extend([item(0)])
    assert buffer.get_length() == 1


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="sample_batch_size must be"):
        DetachedReplayBuffer(0)
