"""The folder in which a server finds each version of the weights, and its lock, which reserves the server."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rlhf_core.errors import ConfigError
from rlhf_core.util import write_tensors

from .config import WHERE, HttpEngineConfig

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("rlhf.engine.http")
_CLAIM_SECONDS = 60.0
_POLL_SECONDS = 0.5


class WeightsFolder:
    """Folder of one server. Only one process at a time has it, and with it the server."""

    def __init__(self, url: str, path: Path, path_for_server: Path, lock: IO[str]) -> None:
        """Use `claim`."""
        self.url = url
        self._path = path
        self._path_for_server = path_for_server
        self._lock = lock

    @classmethod
    def claim(cls, config: HttpEngineConfig, *, seconds: float = _CLAIM_SECONDS) -> WeightsFolder:
        """Reserve a free server among `url`, and remove what an earlier run left in its folder.

        Raises `ConfigError` if all are in use for `seconds`. A lost maker may need a moment to end.
        """
        parent = _private_folder() if config.weights_folder is None else Path(config.weights_folder)
        for_server = Path(config.server_weights_folder or parent)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            deadline = time.monotonic() + seconds
            is_waiting = False
            while True:
                for url in config.url:
                    name = _folder_name(url)
                    if (lock := _try_lock(parent / f"{name}.lock")) is not None:
                        shutil.rmtree(parent / name, ignore_errors=True)
                        (parent / name).mkdir()
                        return cls(url, parent / name, for_server / name, lock)
                if time.monotonic() >= deadline:
                    break
                if not is_waiting:
                    logger.warning("every server of engine.url is in use. Waiting at most %g s for one", seconds)
                    is_waiting = True
                time.sleep(_POLL_SECONDS)
        except OSError as error:
            raise ConfigError(
                f"cannot write to {parent}: {error.strerror or error}", where="engine.weights_folder"
            ) from error
        raise ConfigError(
            f"every server of engine.url ({', '.join(config.url)}) already serves another process or run",
            where=WHERE,
            hint="list one server for each process that samples (transport.num_makers, or num_processes), "
            "or end the other run",
        )

    def write(self, name: str, shards: Iterable[Mapping[str, Tensor]]) -> Path:
        """Write a version, and return its folder as the server sees it. Older versions are kept until `keep_only`."""
        partial = self._path / f"{name}.partial"
        partial.mkdir()
        for number, shard in enumerate(shards, start=1):
            write_tensors(partial / f"model-{number:05d}.safetensors", dict(shard))
        partial.rename(self._path / name)
        return self._path_for_server / name

    def keep_only(self, name: str) -> None:
        """Remove all other versions."""
        for each in self._path.iterdir():
            if each.name != name:
                shutil.rmtree(each, ignore_errors=True)

    def close(self) -> None:
        """Remove the weights and release the server."""
        shutil.rmtree(self._path, ignore_errors=True)
        self._lock.close()


def _folder_name(url: str) -> str:
    """Readable and unique name for a server's folder."""
    shown = re.sub(r"[^A-Za-z0-9.-]+", "-", url.partition("://")[2])[:60]
    return f"{shown}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def _private_folder() -> Path:
    """Folder that only this user can write to, the same for all processes of this machine."""
    folder = Path(tempfile.gettempdir()) / f"rlhf-engine-http-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ConfigError(
            f"{folder} belongs to another user", where=WHERE, hint="set engine.weights_folder to a folder of yours"
        )
    return folder


def _try_lock(path: Path) -> IO[str] | None:
    """Lock a file until it is closed or the process ends. None if another process has it."""
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
