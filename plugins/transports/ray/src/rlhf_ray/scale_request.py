"""`ray-scale.json` in a run folder: what `rlhf ray scale` asks the driver of a running job for.

The driver takes a regular file of its own user, and nothing but the values below. Its answer is in `ray.json`.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhf_core.util import is_own, write_json

logger = logging.getLogger("rlhf.ray")

_REQUEST = "ray-scale.json"
MOST_MAKERS = 1024
_MAX_BYTES = 4096
"""Most bytes of a request; longer files are none."""


class ScaleRequest(BaseModel):
    """The run is to have `makers` makers within `timeout_seconds`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: str = Field(max_length=100)
    makers: int = Field(ge=1, le=MOST_MAKERS)
    timeout_seconds: float = Field(gt=0, le=604800)


class ScaleAnswer(BaseModel):
    """The driver has done what a request asks for, or will not."""

    id: str
    problem: str
    """Why it will not; empty if it is done."""


class ScaleRequests:
    """The requests to one run, for sender and driver."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _REQUEST

    def send(self, makers: int, timeout_seconds: float) -> ScaleRequest:
        """Replaces a request that was not taken yet."""
        name = f"{time.time_ns():020d}-{os.getpid()}"
        request = ScaleRequest(id=name, makers=makers, timeout_seconds=timeout_seconds)
        write_json(self._path, request.model_dump())
        return request

    def take(self) -> ScaleRequest | None:
        """The newest request, once; what is none is removed, and said in the log."""
        if not is_own(self._path):
            return None
        try:
            with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                text = file.read(_MAX_BYTES)
            self._path.unlink(missing_ok=True)
            return ScaleRequest.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            logger.warning("%s is no request and is removed: %s", self._path, first["msg"])
        except OSError as error:
            logger.warning("%s cannot be read: %s", self._path, error)
        return None

    def clear(self) -> None:
        """Remove what was asked of an earlier driver, or is not wanted any more."""
        if is_own(self._path):
            self._path.unlink(missing_ok=True)
