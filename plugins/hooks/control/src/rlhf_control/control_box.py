"""Commands to a running run, as small files in `control/` in the run folder.

A sender writes `<id>.json` atomically. The run reads it at its next update, executes it, and writes
`<id>.answer.json`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from rlhf_core.errors import DeadlineError, RlhfError, UserInputError
from rlhf_core.util import is_own_file, suggestion, write_json

Kind = Literal["pause", "resume", "checkpoint", "stop", "set"]
KEYS = {
    "lr": "optimizer.lr",
    "critic_lr": "optimizer.critic_lr",
    "kl_coef": "algorithm.kl_coef",
}
"""Options that can be set during a run, by short name. The full name is accepted, too."""

_ANSWER = ".answer.json"
_POLL_SECONDS = 0.1
_MAX_BYTES = 4096
"""Maximum size of a command file. Larger files are invalid."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command to a run."""

    kind: Kind
    key: str | None = None
    """Full name of the option, for `set`."""
    value: float | None = None
    id: str = ""

    def __str__(self) -> str:
        return self.kind if self.key is None else f"{self.kind} {self.key}={self.value:g}"


def parse_command(words: Sequence[str]) -> Command:
    """Parse a command. Raises `UserInputError` if it is not valid.

    Example:
        >>> parse_command(["set", "lr=1e-6"])
        Command(kind='set', key='optimizer.lr', value=1e-06, id='')
    """
    kinds = get_args(Kind)
    kind = words[0] if words else ""
    if kind not in kinds:
        raise UserInputError(
            f'"{kind}" is not a command{suggestion(kind, kinds)}', where="control", hint=f"one of {', '.join(kinds)}"
        )
    if kind != "set":
        if len(words) > 1:
            raise UserInputError(f"does not accept arguments, got {' '.join(words[1:])}", where=f"control {kind}")
        return Command(cast(Kind, kind))
    if len(words) != 2:
        raise UserInputError("needs one key=value", where="control set", hint="rlhf control RUN_DIR set lr=1e-6")
    return _parse_setting(words[1])


def _parse_setting(text: str) -> Command:
    name, _, number = text.partition("=")
    key = KEYS.get(name, name)
    if key not in KEYS.values():
        raise UserInputError(
            f"{name} cannot be changed during a run{suggestion(name, [*KEYS, *KEYS.values()])}",
            where="control set",
            hint=f"one of {', '.join(KEYS)} (to change others: stop, edit the run file, and use --resume auto)",
        )
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise UserInputError(f'"{number}" is not a number of at least 0', where=f"control set {name}")
    return Command("set", key, value)


class ControlBox:
    """The commands of one run folder, used by sender and run."""

    def __init__(self, folder: Path) -> None:
        """Use the run's folder `control/`, which the first command creates."""
        self._folder = folder

    def send(self, command: Command) -> str:
        """Send a command to the run and return its id."""
        self._folder.mkdir(exist_ok=True)
        command_id = f"{time.time_ns():020d}-{os.getpid()}"
        write_json(self._folder / f"{command_id}.json", {**asdict(command), "id": command_id})
        return command_id

    def take(self) -> list[Command]:
        """Remove and return the commands since the last call, oldest first.

        An invalid file is answered and removed. Anything but a regular file of this user is ignored.
        """
        if not self._exists:
            return []
        try:
            names = sorted(entry.name for entry in os.scandir(self._folder))
        except FileNotFoundError:
            return []
        commands = []
        for name in names:
            path = self._folder / name
            if name.endswith(".json") and not name.startswith(".") and not name.endswith(_ANSWER) and is_own_file(path):
                command = _read(path)
                path.unlink()
                if command is None:
                    self.answer(name.removesuffix(".json"), "this is not a command", refused=True)
                else:
                    commands.append(command)
        return commands

    def answer(self, command_id: str, text: str, *, refused: bool = False) -> None:
        """Write the result of a command for its sender."""
        write_json(self._folder / f"{command_id}{_ANSWER}", {"text": text, "refused": refused})

    def wait(self, command_id: str, *, seconds: float, is_running: Callable[[], bool]) -> str:
        """Wait for the run's answer to a command and return it.

        Raises:
            UserInputError: if the run refused the command.
            RlhfError: if the run ended before it received the command.
            DeadlineError: if the answer is not available within `seconds`. A command that was not received is kept.
        """
        path = self._folder / f"{command_id}{_ANSWER}"
        deadline = time.monotonic() + seconds
        while not path.exists():
            if not is_running() and not path.exists():
                (self._folder / f"{command_id}.json").unlink(missing_ok=True)
                raise RlhfError("the run ended before it received the command", where=str(self._folder.parent))
            if time.monotonic() > deadline:
                is_kept = (self._folder / f"{command_id}.json").exists()
                state = "is still queued" if is_kept else "was received, but its answer is missing"
                raise DeadlineError(
                    f"waited {seconds:g} s for the run to reach the end of an update: the command {state}",
                    where=str(self._folder.parent),
                    hint="wait longer with --wait-seconds",
                )
            time.sleep(_POLL_SECONDS)
        answer = json.loads(path.read_text(encoding="utf-8"))
        path.unlink(missing_ok=True)
        if answer["refused"]:
            raise UserInputError(answer["text"], where="control")
        return str(answer["text"])

    def clear(self, before_ns: float = math.inf) -> None:
        """Remove commands to an earlier session: those older than `before_ns` (Unix time in nanoseconds)."""
        for path in self._folder.glob("*.json") if self._exists else ():
            with suppress(FileNotFoundError):  # another process of the run may remove them, too
                if is_own_file(path) and path.stat().st_mtime_ns < before_ns:
                    path.unlink()

    @property
    def _exists(self) -> bool:
        return self._folder.is_dir() and not self._folder.is_symlink()


def _read(path: Path) -> Command | None:
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(_MAX_BYTES))
        words = [str(record["kind"])]
        if record["kind"] == "set":
            words.append(f"{record['key']}={record['value']}")
        command = parse_command(words)
    except (ValueError, KeyError, TypeError, RecursionError, UserInputError):
        return None
    return Command(command.kind, command.key, command.value, path.name.removesuffix(".json"))
