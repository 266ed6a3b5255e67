"""Commands for a run: what they may say, and how they travel."""

import os
import threading

import pytest

from rlhf_control.control_box import Command, ControlBox, parse_command
from rlhf_core.errors import DeadlineError, RlhfError, UserInputError


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["pause"], Command("pause")),
        (["set", "lr=1e-6"], Command("set", "optimizer.lr", 1e-6)),
        (["set", "algorithm.kl_coef=0.1"], Command("set", "algorithm.kl_coef", 0.1)),
    ],
)
def test_commands(words, command):
    assert parse_command(words) == command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], '"" is not a command'),
        (["paus"], "did you mean"),
        (["pause", "now"], "does not accept arguments"),
        (["set"], "needs one key=value"),
        (["set", "learning_rate=1"], "cannot be changed during a run"),
        (["set", "lr=fast"], "is not a number"),
        (["set", "lr=-1"], "is not a number of at least 0"),
        (["set", "lr=nan"], "is not a number of at least 0"),
    ],
)
def test_wrong_commands_are_the_users_mistake(words, message):
    with pytest.raises(UserInputError, match=message):
        parse_command(words)


@pytest.fixture
def box(tmp_path):
    return ControlBox(tmp_path / "control")


def test_commands_are_taken_once_and_in_order(box):
    assert box.take() == []
    sent = [box.send(Command("pause")), box.send(Command("set", "optimizer.lr", 1e-7))]
    taken = box.take()
    assert [(each.kind, each.key, each.value) for each in taken] == [
        ("pause", None, None),
        ("set", "optimizer.lr", 1e-7),
    ]
    assert [each.id for each in taken] == sent
    assert box.take() == []


def test_the_sender_gets_its_answer(box):
    command_id = box.send(Command("pause"))
    run = threading.Timer(0.05, lambda: [box.answer(each.id, "paused") for each in box.take()])
    run.start()
    assert box.wait(command_id, seconds=30, is_running=lambda: True) == "paused"
    run.join()
    refused = box.send(Command("set", "algorithm.kl_coef", 1.0))
    box.answer(refused, "cannot be changed", refused=True)
    with pytest.raises(UserInputError, match="cannot be changed"):
        box.wait(refused, seconds=30, is_running=lambda: True)


def test_a_run_that_ended_or_is_late_is_said(box):
    command_id = box.send(Command("pause"))
    with pytest.raises(DeadlineError, match="the end of an update"):
        box.wait(command_id, seconds=0, is_running=lambda: True)
    with pytest.raises(RlhfError, match="the run ended before it received the command"):
        box.wait(command_id, seconds=30, is_running=lambda: False)
    assert box.take() == []


def test_a_file_that_is_no_command_is_answered_and_removed(box):
    box.send(Command("pause"))
    (box._folder / "7.json").write_text('{"kind": "set", "key": "model.path", "value": 1}')
    (box._folder / "8.json").write_text("{")
    assert [each.kind for each in box.take()] == ["pause"]
    for number in ("7", "8"):
        with pytest.raises(UserInputError, match="this is not a command"):
            box.wait(number, seconds=1, is_running=lambda: True)


def test_what_was_asked_of_an_earlier_session_is_dropped(box):
    box.clear()
    box.send(Command("stop"))
    box.clear()
    assert box.take() == []


def test_only_regular_files_of_ones_own_are_commands(box, tmp_path, monkeypatch):
    command_id = box.send(Command("pause"))
    folder = tmp_path / "control"
    os.mkfifo(folder / "1.json")
    (folder / "2.json").symlink_to(folder / f"{command_id}.json")
    (folder / "3.json").mkdir()
    with monkeypatch.context() as other_user:
        other_user.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert box.take() == []
    (folder / "4.json").write_text("[" * 100_000)
    assert [each.id for each in box.take()] == [command_id]
    box.clear()
    assert sorted(path.name for path in folder.iterdir()) == ["1.json", "2.json", "3.json"]


def test_a_link_to_another_folder_is_no_control_box(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.json").write_text('{"kind": "pause"}')
    (tmp_path / "control").symlink_to(elsewhere)
    box = ControlBox(tmp_path / "control")
    assert box.take() == []
    box.clear()
    assert (elsewhere / "mine.json").exists()
