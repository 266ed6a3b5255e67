"""Reads this process's rank and world size from its launcher's environment, as torchrun sets it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UserInputError


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """This process's place among those started together; by default it is alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine; selects the GPU."""
    master_addr: str | None = None
    master_port: int | None = None
    """Where the processes meet; None for a single one."""


def read_launch_env(environ: Mapping[str, str] | None = None) -> LaunchEnv:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Raises `UserInputError` when only some of them are set or one is not a number.
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
