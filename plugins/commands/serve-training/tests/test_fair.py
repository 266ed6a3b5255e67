"""Turns of tenants."""

from rlhf_serve_training.fair import SAMPLE, TRAIN, FairQueue
from rlhf_serve_training.store import StoredRequest


def request(tenant, owner, seq, kind="optim_step"):
    return StoredRequest(f"{owner}:{kind}:{seq}", tenant, owner, seq, kind, "queued", 10)


def drained(queue):
    turns = []
    while (turn := queue.take()) is not None:
        turns.append([each.id for each in turn.requests])
    return turns


def test_tenants_take_turns_and_models_keep_their_order():
    queue = FairQueue(lambda each: 1, max_batch=8)
    queue.begin("a", "m", 1)
    queue.begin("b", "n", 1)
    for seq in (3, 1, 2):
        queue.add(request("a", "m", seq), "m", TRAIN)
    queue.add(request("b", "n", 1), "n", TRAIN)
    assert drained(queue) == [["m:optim_step:1"], ["n:optim_step:1"], ["m:optim_step:2"], ["m:optim_step:3"]]


def test_a_model_waits_for_the_missing_number():
    queue = FairQueue(lambda each: 1, max_batch=8)
    queue.begin("a", "m", 1)
    queue.add(request("a", "m", 2), "m", TRAIN)
    assert queue.take() is None
    assert queue.has_room_for("a", "m", 1)
    queue.add(request("a", "m", 1), "m", TRAIN)
    assert drained(queue) == [["m:optim_step:1"], ["m:optim_step:2"]]
    assert queue.load("a") == (0, 0)


def test_samples_of_an_adapter_share_a_turn_of_bounded_size():
    queue = FairQueue(lambda each: 3, max_batch=7)
    for seq in range(5):
        queue.add(request("a", "s", seq, "asample"), "sample:x", SAMPLE)
    assert queue.load("a") == (5, 50)
    assert queue.remove("s:asample:4").seq == 4
    assert [len(each) for each in drained(queue)] == [2, 2]
    assert queue.load("a") == (0, 0)


def test_a_tenant_with_many_samples_does_not_delay_another():
    queue = FairQueue(lambda each: 1, max_batch=2)
    for seq in range(6):
        queue.add(request("a", "s", seq, "asample"), "sample:x", SAMPLE)
    queue.begin("b", "n", 1)
    queue.add(request("b", "n", 1), "n", TRAIN)
    order = [turn[0][0] for turn in drained(queue)]
    assert order.index("n") == 1


def test_only_samples_are_canceled():
    queue = FairQueue(lambda each: 1, max_batch=2)
    queue.add(request("a", "s", 1, "create_model"), "create:s", "create")
    assert queue.remove("s:create_model:1") is None
    assert drained(queue) == [["s:create_model:1"]]


def test_closing_a_model_returns_what_waits():
    queue = FairQueue(lambda each: 1, max_batch=2)
    queue.begin("a", "m", 1)
    queue.add(request("a", "m", 5), "m", TRAIN)
    assert [each.seq for each in queue.end("a", "m")] == [5]
    assert queue.load("a") == (0, 0)


def test_a_number_that_does_not_arrive_is_given_up():
    queue = FairQueue(lambda each: 1, max_batch=8)
    queue.begin("a", "m", 1)
    for seq in (2, 3):
        queue.add(request("a", "m", seq), "m", TRAIN)
    assert queue.give_up(0.0, 10.0) == []
    assert queue.give_up(9.0, 10.0) == []
    assert [(each.seq, missing) for each, missing in queue.give_up(11.0, 10.0)] == [(2, 1), (3, 1)]
    assert queue.load("a") == (0, 0)
    assert queue.is_late("a", "m", 1)
    assert not queue.is_late("a", "m", 4)
    queue.add(request("a", "m", 4), "m", TRAIN)
    assert drained(queue) == [["m:optim_step:4"]]


def test_a_number_that_arrives_in_time_is_not_given_up():
    queue = FairQueue(lambda each: 1, max_batch=8)
    queue.begin("a", "m", 1)
    queue.add(request("a", "m", 2), "m", TRAIN)
    assert queue.give_up(0.0, 10.0) == []
    queue.add(request("a", "m", 1), "m", TRAIN)
    assert queue.give_up(11.0, 10.0) == []
    assert len(drained(queue)) == 2
