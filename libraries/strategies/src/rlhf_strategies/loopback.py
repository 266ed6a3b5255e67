"""Keeps communication of processes on the interface that they share, out of others' reach: on one machine, loopback.

torch's stores listen on all interfaces unless they are given a socket; gloo and NCCL listen on the one that the host
name resolves to unless configured otherwise.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

HOST = "127.0.0.1"
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def keep_to_loopback() -> None:
    """Make gloo and NCCL of this process and its children listen on loopback, unless the user has set an interface."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    for variable in _INTERFACE_VARIABLES if names else ():
        os.environ.setdefault(variable, names[0])


def served_store(host: str, port: int = 0, *, world_size: int | None = None, timeout: timedelta) -> TCPStore:
    """A store that listens at `host` alone. Port 0 takes a free one (`.port`). Waits for no other process."""
    listener = socket.create_server((host, port), backlog=1024)
    return TCPStore(
        host,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store's from here on
    )
