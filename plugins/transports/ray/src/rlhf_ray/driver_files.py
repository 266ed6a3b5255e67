"""`ray.json` and `ray-request.json` in the folder of a running detached run: its driver's status, and requests to it.

A folder may belong to another user: both files are validated, and each side reads only its own user's regular files.
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
MAX_MAKERS = 1024
_MAX_BYTES = 4096
"""Maximum size of a request. Only this much of a longer file is read, which makes it invalid."""
_MAX_SILENCE_SECONDS = 60.0
"""Silence after which a driver on another machine is presumed dead."""


class DriverRequest(BaseModel):
    """Request of a command to the driver. A newer request replaces one that the driver has not read yet."""

    model_config = ConfigDict(strict=True, extra="forbid")

    do: Literal["scale", "stop", "stop-now"]
    makers: int = Field(default=1, ge=1, le=MAX_MAKERS)
    """For `scale`: number of makers that the run should have within `timeout_seconds`."""
    timeout_seconds: float = Field(default=600.0, gt=0, le=604800)
    id: str = Field(default_factory=lambda: f"{time.time_ns():020d}-{os.getpid()}", max_length=100)

    def send(self, folder: Path) -> None:
        """Write the request into the run folder."""
        write_json(folder / _REQUEST, self.model_dump())


def take_request(folder: Path) -> DriverRequest | None:
    """Read and remove the newest request. An invalid one is removed with a warning. Returns None without a request."""
    path = folder / _REQUEST
    if not is_own_file(path):
        return None
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            text = file.read(_MAX_BYTES)
        clear_request(folder)
        return DriverRequest.model_validate_json(text)
    except ValidationError as error:
        logger.warning("%s is not a valid request and was removed: %s", path, _first_problem(error))
    except OSError as error:
        logger.warning("%s cannot be read: %s", path, error)
    return None


def clear_request(folder: Path) -> None:
    """Remove a request that was meant for an earlier driver or has expired."""
    if is_own_file(folder / _REQUEST):
        (folder / _REQUEST).unlink(missing_ok=True)


class ScaleAnswer(BaseModel):
    """Answer of the driver: a request was completed or rejected."""

    id: str
    problem: str
    """Reason for the rejection. Empty if the request was completed."""


class ActorRow(BaseModel):
    """State of a maker or a trainer for the driver, `ray.json` and `rlhf ray status`."""

    name: str
    pid: int | None = None
    node: str | None = None
    doing: str = "loads its models"
    for_s: float = 0.0
    busy: float | None = None
    """Fraction of its time in which it worked."""
    version: int | None = None
    """Version of a maker's weights. None before the first."""
    restarts: int = 0
    groups: int = 0
    """Prompts that a maker has finished."""
    waiting: int = 0
    """Finished prompts that wait to be trained on."""


class Status(BaseModel):
    """Contents of `ray.json`, which the driver writes about every second and removes when it ends."""

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
        """Whether the driver is alive, as far as this machine can determine: a run locks its folder until it ends.

        The folder may be locked by a later run of another transport, so the process is checked too.
        """
        if not self.is_here:
            return time.time() - self.updated < _MAX_SILENCE_SECONDS
        return RunFolder(folder).is_in_use and psutil.pid_exists(self.driver_pid)


def read_status(folder: Path) -> Status | None:
    """Read the status of a detached run.

    Returns:
        The status, or None if the run ended normally or was never detached.

    Raises:
        UserInputError: The folder does not exist, or its file is invalid or belongs to another user.
    """
    path = folder / STATUS
    if not os.path.isdir(folder):
        raise UserInputError("the folder does not exist", where=str(folder), hint="pass the folder given to --output")
    if not os.path.lexists(path):
        return None
    if not is_own_file(path):
        raise UserInputError("not a regular file that you own", where=str(path))
    try:
        return Status.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = f"not written by a driver: {_first_problem(error)}"
        raise UserInputError(problem, where=str(path), hint="remove it if no run is active here") from error


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return ": ".join([".".join(map(str, first["loc"])) or "its text", first["msg"]])
