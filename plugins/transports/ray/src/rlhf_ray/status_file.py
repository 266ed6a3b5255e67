"""`ray.json`, in the folder of a running detached run: for `rlhf ray status`, `scale` and `stop`."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhf_core.errors import UserInputError
from rlhf_core.util import is_own

from .scale_request import ScaleAnswer

STATUS = "ray.json"


def start_time(pid: int) -> str | None:
    """Start time in clock ticks since boot; None when there is no such process, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


class ActorRow(BaseModel):
    """A maker or a trainer, and what it does: for the driver, in `ray.json`, and for `rlhf ray status`."""

    name: str
    pid: int | None = None
    node: str | None = None
    doing: str = "loads its models"
    for_s: float = 0.0
    busy: float | None = None
    """Share of its time in which it worked."""
    version: int | None = None
    """Version of a maker's weights; None before it has any."""
    restarts: int = 0
    groups: int = 0
    """Prompts that a maker has finished."""
    waiting: int = 0
    """Those of them that wait to be trained on."""


class Status(BaseModel):
    """Contents of a status file; validated, since run folders are untrusted."""

    model_config = ConfigDict(strict=True)

    driver_pid: int = Field(gt=1)
    driver_start: str | None
    """See `start_time`."""
    host: str
    address: str
    namespace: str
    updated: float
    version: int
    progress: str
    queue: int = 0
    """Finished prompts that wait to be trained on."""
    scaling: ScaleAnswer | None = None
    trainers: list[ActorRow]
    makers: list[ActorRow]


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A run's status file and its validated contents."""

    path: Path
    values: Status

    @property
    def driver_pid(self) -> int:
        return self.values.driver_pid

    @property
    def is_here(self) -> bool:
        """Whether the driver ran on this machine."""
        return self.values.host == socket.gethostname()

    @property
    def is_running(self) -> bool:
        """Whether the driver is alive, as far as this machine can tell."""
        if not self.is_here:
            return time.time() - self.values.updated < 60
        # The id alone may have been reused.
        return self.values.driver_start is not None and start_time(self.driver_pid) == self.values.driver_start

    def interrupt(self) -> None:
        """Send the driver SIGINT, as Ctrl-C does.

        Raises `UserInputError` if the process of that id is not the driver, or is another user's.
        """
        place = Path("/proc") / str(self.driver_pid)
        if not self.is_running or place.stat().st_uid != os.geteuid():
            raise UserInputError(
                f"process {self.driver_pid} is not this run's driver, or another user's, so nothing is sent to it",
                where=str(self.path),
                hint="stop the driver with Ctrl-C in its own terminal",
            )
        os.kill(self.driver_pid, signal.SIGINT)

    def clear(self) -> bool:
        """Remove the file of a killed driver of this machine; False where it runs, or ran elsewhere."""
        if self.is_running or not self.is_here:
            return False
        self.path.unlink(missing_ok=True)
        return True


def read_status(folder: Path) -> RunningJob | None:
    """The status of a detached run in `folder`; None where there is none, or it has ended normally."""
    path = folder / STATUS
    if not os.path.isdir(folder):
        raise UserInputError("there is no such folder", where=str(folder), hint="give the folder that --output named")
    if not os.path.lexists(path):
        return None
    if not is_own(path):
        raise UserInputError("is no regular file of yours", where=str(path))
    try:
        return RunningJob(path, Status.model_validate_json(path.read_bytes()))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        wrong = ": ".join([".".join(map(str, first["loc"])) or "its text", first["msg"]])
        raise UserInputError(
            f"is not what a driver writes: {wrong}", where=str(path), hint="remove it if no run goes on here"
        ) from error
