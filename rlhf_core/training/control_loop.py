"""Executes the commands of `rlhf control` on all ranks together, between updates and episodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from ..errors import RlhfError
from ..runfolder.control_box import Command, ControlBox
from ..runfolder.folder import RunFolder
from ..strategy import Strategy

logger = logging.getLogger("rlhf")

CONTROL = "control"
"""Kind of the event in the manifest."""
_PAUSED_POLL_SECONDS = 0.25

Setter = Callable[[float], str]
"""Sets the new value and returns a description; raises `RlhfError` where it cannot be set."""


class ControlLoop:
    """Receives commands on rank 0 and has every rank execute them at the same point."""

    def __init__(
        self,
        folder: RunFolder,
        strategy: Strategy,
        setters: Mapping[str, Setter],
        interrupted: Callable[[], bool],
    ) -> None:
        """`setters`: option -> its setter on this rank. `interrupted`: whether this rank received a signal."""
        self._folder = folder
        self._strategy = strategy
        self._setters = setters
        self._interrupted = interrupted
        self._box = ControlBox(folder.control)
        self._paused = False
        self.checkpoint_asked = False
        self.stop_asked = False

    def after_update(self, step: int, episode: int) -> None:
        """Collective. Execute pending commands; while paused, wait here. A signal to any rank ends the pause."""
        self._take(step, episode)
        while self._paused and not self.stop_asked:
            time.sleep(_PAUSED_POLL_SECONDS)
            self._take(step, episode)
            self.stop_asked = self.stop_asked or self.agree(self._interrupted())

    def agree(self, flag: bool) -> bool:
        """Collective. True on every rank if `flag` is True on any."""
        import torch

        return bool(self._strategy.all_reduce(torch.tensor([float(flag)]), "max").item() > 0)

    def _take(self, step: int, episode: int) -> None:
        for command in self._agreed():
            try:
                text, refused = self._do(command, episode), False
            except RlhfError as error:
                text, refused = error.message, True
            if self._strategy.is_main:
                logger.warning("control %s, after update %d: %s", command, step, text)
                self._box.answer(command.id, text, refused=refused)
                facts = {"command": str(command), "step": step, "episode": episode, "answer": text}
                self._folder.add_event(CONTROL, facts)

    def _agreed(self) -> list[Command]:
        """Rank 0's commands, on every rank."""
        commands = self._box.take() if self._strategy.is_main else []
        if self._strategy.num_processes == 1:
            return commands
        if not self.agree(bool(commands)):
            return []
        agreed: list[Command] = self._strategy.broadcast_object(commands)
        return agreed

    def _do(self, command: Command, episode: int) -> str:
        if command.kind == "pause":
            self._paused = True
            return "paused; resume goes on, stop ends the run with a checkpoint"
        if command.kind == "resume":
            was_paused, self._paused = self._paused, False
            return "goes on" if was_paused else "was not paused"
        if command.kind == "checkpoint":
            self.checkpoint_asked = True
            return f"a checkpoint is written at the end of episode {episode + 1}"
        if command.kind == "stop":
            self.stop_asked = True
            return f"stops at the end of episode {episode + 1}, with a checkpoint and the model"
        assert command.key is not None and command.value is not None
        return self._setters[command.key](command.value)
