"""Reads this process's rank and world size from its launcher's environment: torchrun (torch elastic) or SLURM."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

from ..errors import UserInputError

_SLURM_PORT_BASE = 15000
_SLURM_PORT_RANGE = 20000


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """This process's place among those started together."""

    launcher: Literal["torchrun", "slurm", "none"] = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine; selects the GPU."""
    master_addr: str | None = None
    master_port: int | None = None
    """Rendezvous port; None for a single process."""


def read_launch_env(environ: Mapping[str, str] | None = None) -> LaunchEnv:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, or what SLURM's `srun` sets.

    torchrun's variables win where both are there (torchrun under SLURM). With neither, one process alone.
    Raises `UserInputError` when only some of them are set or one is not a number.
    """
    environ = os.environ if environ is None else environ
    launcher: Literal["torchrun", "slurm"] = "torchrun"
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        if "SLURM_PROCID" not in environ or not {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"} & environ.keys():
            return LaunchEnv()
        launcher, environ = "slurm", _of_slurm(environ)
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    alone = world_size == 1
    return _checked(
        LaunchEnv(
            launcher=launcher,
            rank=rank,
            world_size=world_size,
            local_rank=_number(environ, "LOCAL_RANK", default=0 if alone else None),
            master_addr=environ.get("MASTER_ADDR"),
            master_port=None if alone and "MASTER_PORT" not in environ else _number(environ, "MASTER_PORT"),
        )
    )


def _of_slurm(environ: Mapping[str, str]) -> Mapping[str, str]:
    """What torchrun would set; MASTER_ADDR and MASTER_PORT are kept."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    # Every process of the job must come to the same port without talking to the others.
    port = _SLURM_PORT_BASE + _number(environ, "SLURM_JOB_ID", default=0) % _SLURM_PORT_RANGE
    return {
        "MASTER_ADDR": first_host(nodes) if nodes else "127.0.0.1",
        "MASTER_PORT": str(port),
        **environ,
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
    }


def _checked(env: LaunchEnv) -> LaunchEnv:
    if not 0 <= env.rank < env.world_size:
        raise UserInputError(
            f"rank {env.rank} of {env.world_size} processes does not exist",
            where=f"environment ({env.launcher})",
            hint="start with `--num-processes N` or torchrun, or unset RANK and WORLD_SIZE",
        )
    if env.world_size > 1 and (env.master_addr is None or env.master_port is None):
        raise UserInputError(
            f"{env.world_size} processes, but MASTER_ADDR or MASTER_PORT is not set",
            where=f"environment ({env.launcher})",
            hint="start with `--num-processes N` or torchrun, which set them",
        )
    return env


def _number(environ: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = environ.get(key)
    if text is None:
        if default is not None:
            return default
        raise UserInputError(
            f"{key} is not set, though other variables of a launcher are",
            where="environment",
            hint="start with `--num-processes N` or torchrun, or unset RANK and WORLD_SIZE",
        )
    if not text.strip().isdigit():
        raise UserInputError(f"{key}={text!r} is not a whole number", where="environment", hint=f"unset {key}")
    return int(text)


def first_host(nodelist: str) -> str:
    """First host of a SLURM node list: `gpu[007-009,12],cpu1` -> `gpu007`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodelist.strip())
    if match is None:
        raise UserInputError(f"cannot read the node list {nodelist!r}", where="SLURM", hint="set MASTER_ADDR")
    prefix, number, suffix = match.groups()
    return f"{prefix}{number or ''}{suffix or ''}"


def is_loopback(host: str | None) -> bool:
    """Whether an address is a loopback address, so that all processes that use it are on this machine."""
    if host is None or host == "localhost":
        return host is not None
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
