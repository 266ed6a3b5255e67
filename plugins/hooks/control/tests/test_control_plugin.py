"""Commands in a run folder become actions, and are answered once these are done."""

import os

import pytest

from rlhf_control.control_box import ControlBox, parse_command
from rlhf_control.hooks import CONTROL, Control
from rlhf_core.components import HookContext
from rlhf_core.config.section import Section
from rlhf_core.errors import UserInputError
from rlhf_core.hookspecs import Moment
from rlhf_core.runfolder.folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    with RunFolder.take(tmp_path / "run") as folder:
        folder.write_manifest({"events": []})
        yield folder


def moment(at="update"):
    return Moment(at=at, step=5, episode=1, metrics={})


@pytest.mark.parametrize("at", ["update", "paused"])
def test_a_command_is_an_action(folder, at):
    plugin, box = Control(Section(), HookContext(run_folder=folder.path)), ControlBox(folder.control)
    for words in ("set lr=1e-6", "pause", "stop"):
        box.send(parse_command(words.split()))
    assert plugin.rlhf_decide(moment("episode")) == []
    change, pause, stop = plugin.rlhf_decide(moment(at))
    assert (change.kind, change.key, change.value, change.by) == ("set", "optimizer.lr", 1e-6, "control")
    assert (pause.kind, stop.kind) == ("pause", "interrupt")
    assert plugin.rlhf_decide(moment(at)) == []


def test_it_is_answered_and_noted(folder):
    plugin, box = Control(Section(), HookContext(run_folder=folder.path)), ControlBox(folder.control)
    sent = [box.send(parse_command(["stop"])), box.send(parse_command(["set", "kl_coef=1"]))]
    stop, change = plugin.rlhf_decide(moment())
    stop.answer("stops at the end of episode 2", False)
    change.answer("it has no KL penalty", True)
    assert box.wait(sent[0], seconds=10, is_running=lambda: True) == "stops at the end of episode 2"
    with pytest.raises(UserInputError, match="it has no KL penalty"):
        box.wait(sent[1], seconds=10, is_running=lambda: True)
    told = [(each["command"], each["step"], each["episode"]) for each in folder.events(CONTROL)]
    assert told == [("stop", 5, 1), ("set algorithm.kl_coef=1", 5, 1)]


def test_commands_from_before_the_folder_was_taken_are_dropped(folder):
    box = ControlBox(folder.control)
    stale, kept = box.send(parse_command(["stop"])), box.send(parse_command(["pause"]))
    taken = folder.lock.stat().st_mtime_ns
    os.utime(folder.control / f"{stale}.json", ns=(taken - 1, taken - 1))
    os.utime(folder.control / f"{kept}.json", ns=(taken, taken))
    plugin = Control(Section(), HookContext(run_folder=folder.path))
    assert [action.kind for action in plugin.rlhf_decide(moment())] == ["pause"]
