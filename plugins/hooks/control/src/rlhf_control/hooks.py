"""Hooks that execute the commands of `rlhf control` in a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rlhf_core import Section
from rlhf_core.components import HookContext
from rlhf_core.hookspecs import Action, Moment, hookimpl
from rlhf_core.runfolder import RunFolder

from .control_box import Command, ControlBox

CONTROL = "control"
"""Name of the plugin, and kind of its events in the manifest."""


class Control:
    """Executes the commands in a run folder after each update, and answers and records them afterwards."""

    def __init__(self, config: Section, context: HookContext) -> None:
        self._folder = RunFolder(context.run_folder)
        self._box = ControlBox(self._folder.control)
        if (lock := self._folder.lock).exists():  # written when the run locked the folder, before the first stage
            self._box.clear(lock.stat().st_mtime_ns)

    @hookimpl
    def rlhf_decide(self, moment: Moment) -> list[Action]:
        commands = self._box.take() if moment.at in ("update", "paused") else []
        return [self._action(command, partial(self._answer, command, moment)) for command in commands]

    def _action(self, command: Command, answer: Callable[[str, bool], None]) -> Action:
        kind = "interrupt" if command.kind == "stop" else command.kind
        key, value = command.key, command.value
        return Action(kind=kind, by=CONTROL, reason=str(command), key=key, value=value, answer=answer)

    def _answer(self, command: Command, moment: Moment, text: str, refused: bool) -> None:
        self._box.answer(command.id, text, refused=refused)
        facts = {"command": str(command), "step": moment.step, "episode": moment.episode, "answer": text}
        self._folder.add_event(CONTROL, facts)
