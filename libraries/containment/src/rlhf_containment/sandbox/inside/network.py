"""The network of a sandboxed command: its own loopback interface, with at most one port that leads out.

The port's listening socket is sent to the process outside, which accepts its connections. No process inside forwards.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

from .kernel import Unavailable

LOOPBACK = "127.0.0.1"
_SET_FLAGS = 0x8914
_UP_AND_RUNNING = 0x1 | 0x40
_BACKLOG = 64
_BUFFERS = {"tcp_rmem": "4096 131072 262144", "tcp_wmem": "4096 65536 262144"}
"""Minimum, default and maximum bytes of a socket's buffers. The system's own maximum is several MiB for each socket."""


def open_loopback(port: int | None, channel: int) -> int:
    """Start the loopback interface of this network namespace. Raises `Unavailable` or `OSError`.

    Args:
        port: Port to listen on. None opens none.
        channel: File descriptor of a Unix socket, to which the listening socket is sent.

    Returns:
        Maximum memory of one socket in bytes.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", _UP_AND_RUNNING)
        try:
            fcntl.ioctl(any_socket, _SET_FLAGS, request)
        except OSError as error:
            raise Unavailable(f"a loopback interface in a network namespace ({error.strerror})") from error
    for name, sizes in _BUFFERS.items():
        with suppress(OSError):  # read-only in some containers. The sizes are read back
            _write(name, sizes)
    if port is not None:
        with socket.socket() as listener, socket.socket(fileno=channel) as outside:
            listener.bind((LOOPBACK, port))
            listener.listen(_BACKLOG)
            socket.send_fds(outside, [b"l"], [listener.fileno()])
    return sum(int(_read(name).split()[2]) for name in _BUFFERS)


def _write(name: str, text: str) -> None:
    with open(f"/proc/sys/net/ipv4/{name}", "w", encoding="ascii") as file:
        file.write(text)


def _read(name: str) -> str:
    with open(f"/proc/sys/net/ipv4/{name}", encoding="ascii") as file:
        return file.read()
