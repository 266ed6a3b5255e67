"""`ray.json` and `ray-request.json` in the folder of a running detached run: what its driver says, and is asked for.

A folder may be anyone's: both files are validated, and each side takes only a regular file of its own user.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhf_core.errors import UserInputError
from rlhf_core.runfolder import RunFolder
from rlhf_core.util import is_own_file, write_json

logger = logging.getLogger("rlhf.ray")

STATUS = "ray.json"
_REQUEST = "ray-request.json"
MOST_MAKERS = 1024
_MAX_BYTES = 4096
"""Most bytes of a request; longer files are none."""
_SILENT_SECONDS = 60.0
"""A driver on another machine that has written nothing for so long is taken for dead."""


class Request(BaseModel):
    """What a command asks the driver for. A newer one takes the place of one that was not taken yet."""

    model_config = ConfigDict(strict=True, extra="forbid")

    do: Literal["scale", "stop", "stop-now"]
    makers: int = Field(default=1, ge=1, le=MOST_MAKERS)
    """For `scale`: makers that the run is to have, within `timeout_seconds`."""
    timeout_seconds: float = Field(default=600.0, gt=0, le=604800)
    id: str = Field(default_factory=lambda: f"{time.time_ns():020d}-{os.getpid()}", max_length=100)

    def send(self, folder: Path) -> None:
        write_json(folder / _REQUEST, self.model_dump())


def take_request(folder: Path) -> Request | None:
    """The newest request, once; what is none is removed, and said in the log."""
    path = folder / _REQUEST
    if not is_own_file(path):
        return None
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            text = file.read(_MAX_BYTES)
        clear_request(folder)
        return Request.model_validate_json(text)
    except ValidationError as error:
        logger.warning("%s is no request and is removed: %s", path, _first(error))
    except OSError as error:
        logger.warning("%s cannot be read: %s", path, error)
    return None


def clear_request(folder: Path) -> None:
    """Remove what was asked of an earlier driver, or is not wanted any more."""
    if is_own_file(folder / _REQUEST):
        (folder / _REQUEST).unlink(missing_ok=True)


class ScaleAnswer(BaseModel):
    """The driver has done what a request asks for, or will not."""

    id: str
    problem: str
    """Why it will not; empty if it is done."""


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
    """What the driver says about every second; there is no file before it begins, and after it has ended."""

    model_config = ConfigDict(strict=True)

    driver_pid: int = Field(gt=1, lt=2**31)
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

    @property
    def is_here(self) -> bool:
        """Whether the driver ran on this machine."""
        return self.host == socket.gethostname()

    def is_running(self, folder: Path) -> bool:
        """Whether the driver is alive, as far as this machine can tell: a run holds its folder to the end.

        The folder may be held by a later run of another transport.
        """
        if not self.is_here:
            return time.time() - self.updated < _SILENT_SECONDS
        return RunFolder(folder).is_in_use and psutil.pid_exists(self.driver_pid)


def read_status(folder: Path) -> Status | None:
    """The status of a detached run in `folder`; None where there is none, or it has ended normally."""
    path = folder / STATUS
    if not os.path.isdir(folder):
        raise UserInputError("there is no such folder", where=str(folder), hint="give the folder that --output named")
    if not os.path.lexists(path):
        return None
    if not is_own_file(path):
        raise UserInputError("is no regular file of yours", where=str(path))
    try:
        return Status.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserInputError(
            f"is not what a driver writes: {_first(error)}", where=str(path), hint="remove it if no run goes on here"
        ) from error


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return ": ".join([".".join(map(str, first["loc"])) or "its text", first["msg"]])
