"""Reads this process's rank and world size from its launcher's environment, as set by torchrun."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UserInputError


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """This process's rank among the processes started together. By default it is the only one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine, which selects the GPU."""
    master_addr: str | None = None
    master_port: int | None = None
    """Address and port at which the processes meet. None for a single process."""


def read_launch_env(environ: Mapping[str, str] | None = None) -> LaunchEnv:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Args:
        environ: environment variables, by default those of this process.

    Returns:
        The launch environment. Without RANK and WORLD_SIZE, that of a single process.

    Raises:
        UserInputError: only some of the variables are set, or one is not a number.

    Example:
        >>> read_launch_env({}).world_size
        1
        >>> variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
        >>> read_launch_env({**variables, "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}).rank
        1
    """
    environ = os.environ if environ is None else environ
    if not {"RANK", "WORLD_SIZE"} & environ.keys():
        return LaunchEnv()
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank >= world_size:
        raise _wrong(f"rank {rank} of {world_size} processes does not exist")
    if world_size == 1:
        return LaunchEnv()
    address = _set(environ, "MASTER_ADDR")
    return LaunchEnv(rank, world_size, _number(environ, "LOCAL_RANK"), address, _number(environ, "MASTER_PORT"))


def _number(environ: Mapping[str, str], key: str) -> int:
    text = _set(environ, key)
    if not text.strip().isdigit():
        raise _wrong(f"{key}={text!r} is not a whole number")
    return int(text)


def _set(environ: Mapping[str, str], key: str) -> str:
    if key not in environ:
        raise _wrong(f"{key} is not set, though other variables of a launcher are")
    return environ[key]


def _wrong(message: str) -> UserInputError:
    hint = "start with `--num-processes N` or torchrun, which set them, or unset RANK and WORLD_SIZE"
    return UserInputError(message, where="environment", hint=hint)
