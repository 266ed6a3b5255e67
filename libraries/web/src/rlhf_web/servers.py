"""What servers and their clients share before any of them is imported: limits, refusals, keys, addresses, sockets."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

from pydantic import ConfigDict, Field

from rlhf_core.config import Section
from rlhf_core.errors import UserInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The connections, bytes and time that clients may take."""

    max_connections: int = 256
    """Open connections; another is told 503 and closed."""
    max_body_bytes: int = 8 * 2**20
    max_bytes_in_flight: int = 16 * 2**20
    """Limit on all bodies together; a larger one waits until it is alone."""
    max_in_flight: int | None = None
    """Limit on the bodies that are held at once; None is any number."""
    wait_seconds: float = 10.0
    """Longest wait of a body for its place under these two limits; then its client is told 503."""
    idle_seconds: float = 30.0
    """Longest time from a request's first byte to its last, headers and body together; longest silence before it, and
    longest time in which a client takes nothing of a response."""


class ClientOptions(Section):
    """Options of what asks a server, as `JsonClient` takes them."""

    model_config = ConfigDict(hide_input_in_errors=True)

    max_connections: int = Field(8, ge=1, description="Requests in flight at once; connections are used again.")
    connect_seconds: float = Field(5.0, gt=0, description="Deadline of a connection attempt.")
    answer_seconds: float = Field(
        30.0, gt=0, description="Longest silence on a connection before a request counts as lost and is sent again."
    )
    patience_seconds: float = Field(
        45.0,
        ge=0,
        description="How long a request is sent again while the server is busy, away, or loses it. Keep it below the "
        "reward's timeout_seconds, which bounds the whole call.",
    )


class Refused(Exception):
    """A request that is not answered; the client is told why."""

    def __init__(self, status: int, code: str, message: str) -> None:
        """status: of HTTP; code: a word for programs."""
        super().__init__(message)
        self.status = status
        self.code = code


def environment_key(variable: str, *, where: str, hint: str | None = None) -> str:
    """The secret in an environment variable. Raises `UserInputError`, as `where`, where there is none."""
    key = os.environ.get(variable)
    if not key:
        raise UserInputError(
            f"the environment variable {variable} is not set", where=where, hint=hint or f"export {variable}=…"
        )
    return key


def server_key(variable: str | None, *, where: str, example: str) -> str | None:
    """The key in the variable that `--api-key-env` names; None where one is to be made and shown.

    example: a variable's name, for the hint. Raises `UserInputError`, as `where`, where there is nobody to show one to.
    """
    if variable is not None:
        return environment_key(variable, where="--api-key-env")
    if not sys.stderr.isatty():
        raise UserInputError(
            "there is no terminal to show a key at, and it must not stand in a log",
            where=where,
            hint=f"export {example}=… and add --api-key-env {example}",
        )
    return None


def bound_socket(host: str, port: int, *, where: str) -> socket.socket:
    """A TCP socket with this address, which does not listen yet. Raises `UserInputError`, as `where`."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise UserInputError(
            f"cannot listen at {host} port {port}: {error.strerror or error}",
            where=where,
            hint="choose another --port; 0 takes a free one",
        ) from None
    return made


def address_parts(
    url: str,
    *,
    form: str = "http://HOST[:PORT]/PATH",
    schemes: Collection[str] = ("http", "https"),
    key_option: str | None = None,
) -> SplitResult:
    """The parts of a server's address, for a field's validator. key_option: what names the variable of a key instead.

    Raises `ValueError` if it does not have this form, or holds credentials.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"no address: {error}") from None
    if parts.scheme not in schemes or not parts.hostname or port == 0:
        raise ValueError(f"should be {form} or https://…")
    if parts.username is not None or parts.password is not None:
        instead = "" if key_option is None else f": name a variable in {key_option} instead"
        raise ValueError(f"holds credentials, which would be written down{instead}")
    return parts


def is_loopback(host: str | None) -> bool:
    """Whether an address is a loopback address, so that all processes that use it are on this machine."""
    if host is None or host == "localhost":
        return host is not None
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
