"""Commands are done at the border of an update, on all ranks alike, and answered by rank 0."""

import pytest

from rlhf_core.errors import UserInputError
from rlhf_core.runfolder.control_box import Command, ControlBox
from rlhf_core.training import control_loop
from rlhf_core.training.control_loop import CONTROL, ControlLoop


def refuse(value):
    raise UserInputError("cannot be set to that", where="optimizer.lr")


@pytest.fixture
def values():
    return []


@pytest.fixture
def make_loop(folder, make_rank, values):
    def make(rank=None, **setters):
        known = {"optimizer.lr": lambda value: values.append(value) or f"lr is {value:g}", **setters}
        return ControlLoop(folder, rank or make_rank(), known, interrupted=lambda: False)

    return make


@pytest.fixture
def box(folder):
    return ControlBox(folder.control)


def answer(box, command_id):
    return box.wait(command_id, seconds=10, is_running=lambda: True)


def test_an_option_is_set_answered_and_noted(make_loop, box, folder, values):
    sent = box.send(Command("set", "optimizer.lr", 1e-6))
    make_loop().after_update(5, 1)
    assert values == [1e-6]
    assert answer(box, sent) == "lr is 1e-06"
    (event,) = folder.events(CONTROL)
    assert (event["command"], event["step"], event["episode"]) == ("set optimizer.lr=1e-06", 5, 1)


def test_what_is_refused_is_answered_and_the_run_goes_on(make_loop, box):
    sent = box.send(Command("set", "optimizer.lr", 1e-6))
    make_loop(**{"optimizer.lr": refuse}).after_update(5, 1)
    with pytest.raises(UserInputError, match="cannot be set to that"):
        answer(box, sent)


def test_stop_and_checkpoint_are_asked_for_the_end_of_the_episode(make_loop, box):
    loop = make_loop()
    loop.after_update(1, 0)
    assert not (loop.stop_asked or loop.checkpoint_asked)
    sent = [box.send(Command("checkpoint")), box.send(Command("stop"))]
    loop.after_update(2, 0)
    assert loop.stop_asked and loop.checkpoint_asked
    assert "end of episode 1" in answer(box, sent[0])


@pytest.mark.parametrize("ending", ["resume", "stop"])
def test_a_paused_run_does_what_it_is_asked_until_it_goes_on(make_loop, box, values, monkeypatch, ending):
    waits = []

    def wait(seconds):
        waits.append(seconds)
        box.send(Command("set", "optimizer.lr", 1.0) if len(waits) == 1 else Command(ending))

    monkeypatch.setattr(control_loop.time, "sleep", wait)
    box.send(Command("pause"))
    make_loop().after_update(1, 0)
    assert values == [1.0]
    assert len(waits) == 2


def test_resuming_what_is_not_paused_says_so(make_loop, box):
    sent = box.send(Command("resume"))
    make_loop().after_update(1, 0)
    assert answer(box, sent) == "was not paused"


def test_another_rank_does_rank_0s_commands_and_takes_none_itself(make_loop, make_rank, box, folder, values):
    box.send(Command("set", "optimizer.lr", 5.0))
    rank = make_rank(rank=1, num_processes=2, said=[[Command("set", "optimizer.lr", 2.0)]])
    loop = make_loop(rank)
    loop.after_update(1, 0)
    loop.after_update(2, 0)
    assert values == [2.0]
    assert folder.events(CONTROL) == []
    assert [each.value for each in box.take()] == [5.0]
