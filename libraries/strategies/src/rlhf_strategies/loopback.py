"""Keeps communication of processes on one machine on the loopback interface, out of others' reach.

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


def loopback_store(
    port: int = 0, *, serves: bool = True, world_size: int | None = None, timeout: timedelta
) -> TCPStore:
    """A store at a loopback port, as server or client. Port 0 takes a free one (`.port`). Waits for no other process.

    Every process of a group must create its store here: torch prefixes the keys of stores that it creates itself.
    """
    if not serves:
        return TCPStore(HOST, port, world_size, is_master=False, timeout=timeout)
    listener = socket.create_server((HOST, port), backlog=1024)
    return TCPStore(
        HOST,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store's from here on
    )
