"""Keeps communication between processes of one machine on the loopback interface, unreachable for other machines.

torch's stores listen on all interfaces unless they receive a socket. gloo and NCCL listen on the interface that the
host name resolves to, unless configured otherwise.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

HOST = "127.0.0.1"
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def keep_to_loopback() -> None:
    """Make gloo and NCCL listen on loopback in this process and its children, unless the user has set an interface."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    for variable in _INTERFACE_VARIABLES if names else ():
        os.environ.setdefault(variable, names[0])


def served_store(host: str, port: int = 0, *, world_size: int | None = None, timeout: timedelta) -> TCPStore:
    """Create a TCP store that listens on `host` only. It does not wait for other processes.

    Args:
        host: address to listen on.
        port: port to listen on, or 0 for a free one.
        world_size: number of processes that will connect, or None if unknown.
        timeout: maximum wait of one store operation.

    Returns:
        The store, whose attribute `port` is the port in use.

    Example:
        >>> store = served_store(HOST, timeout=timedelta(seconds=10))
        >>> store.set("answer", "42")
        >>> store.get("answer")
        b'42'
    """
    listener = socket.create_server((host, port), backlog=1024)
    return TCPStore(
        host,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # owned by the store from here on
    )
