"""`ray.json` in the run folder, while a detached run goes on: what `rlhf ray status` and `stop` read."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import UserInputError
from rlhf_core.util import write_json

from .orphan_reaper import start_time

if TYPE_CHECKING:
    from .actors import Actors
    from .messages import Overview

logger = logging.getLogger("rlhf.ray")

NAME = "ray.json"
_WRITE_SECONDS = 1.0


class StatusFile:
    """Written by the driver about every second; gone when the run is."""

    def __init__(self, folder: Path, address: str, namespace: str) -> None:
        self._path = folder / NAME
        if (left := read_status(folder)) is not None:
            logger.warning("the run's driver before this one (pid %d) was killed", left.driver_pid)
            self.remove()
        self._fixed = {
            "driver_pid": os.getpid(),
            "driver_start": start_time(os.getpid()),
            "host": socket.gethostname(),
            "address": address,
            "namespace": namespace,
            "started": time.time(),
        }
        self._written = float("-inf")

    def write(self, view: Overview, actors: Actors) -> None:
        """The newest state, unless the last is fresh."""
        if time.monotonic() - self._written < _WRITE_SECONDS:
            return
        restarts = {maker.id: maker.attempt for maker in actors.makers}
        makers = [{**maker, "restarts": restarts.get(maker["name"], 0)} for maker in view.makers]
        trainers = [{"name": t.name, "pid": t.pid, "node": t.node} for t in actors.trainers]
        state = {"version": view.version, "progress": view.progress, "trainers": trainers, "makers": makers}
        write_json(self._path, {**self._fixed, "updated": time.time(), **state})
        self._written = time.monotonic()

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class RunningJob:
    """What a status file says."""

    path: Path
    values: dict[str, Any]

    @property
    def driver_pid(self) -> int:
        return int(self.values["driver_pid"])

    @property
    def is_here(self) -> bool:
        """Whether the driver ran on this machine."""
        return bool(self.values["host"] == socket.gethostname())

    @property
    def is_running(self) -> bool:
        """Whether the driver lives, as far as this machine can tell."""
        if not self.is_here:
            return time.time() - float(self.values["updated"]) < 60
        if self.values["driver_start"] is not None:
            # The id alone may be somebody else's by now.
            return bool(start_time(self.driver_pid) == self.values["driver_start"])
        try:
            os.kill(self.driver_pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def clear(self) -> bool:
        """Remove what a driver of this machine left that was killed; False where it runs, or ran elsewhere."""
        if self.is_running or not self.is_here:
            return False
        self.path.unlink(missing_ok=True)
        return True


def read_status(folder: Path) -> RunningJob | None:
    """None where no detached run goes on in `folder`, or it has ended in good order."""
    path = folder / NAME
    if not folder.is_dir():
        raise UserInputError("there is no such folder", where=str(folder), hint="give the folder that --output named")
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserInputError(f"is no JSON: {error}", where=str(path)) from error
    return RunningJob(path, values)
