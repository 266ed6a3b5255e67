"""Limits, refusals, keys, addresses and sockets, shared by servers and clients without importing either."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

from pydantic import ConfigDict, Field

from rlhf_core.config import Section
from rlhf_core.errors import UserInputError

_HOST = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits on connections, bytes and time of all clients of a server."""

    max_connections: int = 256
    """Maximum number of open connections. A further one gets status 503 and is closed."""
    max_body_bytes: int = 8 * 2**20
    """Maximum size of one request body."""
    max_bytes_in_flight: int = 16 * 2**20
    """Maximum size of all bodies in memory. A larger body waits until no other one is in memory."""
    max_in_flight: int | None = None
    """Maximum number of bodies in memory. None is unlimited."""
    wait_seconds: float = 10.0
    """Maximum wait of a body for these two limits, after which its client gets status 503."""
    idle_seconds: float = 30.0
    """Maximum time from the first to the last byte of a request, headers and body together. Also the maximum silence
    before a request, and the maximum time in which a client reads nothing of a response."""


class ClientOptions(Section):
    """Options of a `JsonClient`."""

    model_config = ConfigDict(hide_input_in_errors=True)

    max_connections: int = Field(8, ge=1, description="Maximum number of concurrent requests. Connections are reused.")
    connect_seconds: float = Field(5.0, gt=0, description="Deadline of a connection attempt.")
    answer_seconds: float = Field(
        30.0, gt=0, description="Maximum silence on a connection before a request counts as lost and is sent again."
    )
    patience_seconds: float = Field(
        45.0,
        ge=0,
        description="Total time for retries of a request while the server is busy, unavailable, or loses it. Keep it "
        "below the reward's timeout_seconds, which bounds the whole call.",
    )


class Refused(Exception):
    """A request is refused, and the client receives the reason."""

    def __init__(self, status: int, code: str, message: str) -> None:
        """Create the error.

        Args:
            status: HTTP status of the response.
            code: machine-readable reason, such as `request_too_large`.
            message: reason for people.
        """
        super().__init__(message)
        self.status = status
        self.code = code


def environment_key(variable: str, *, where: str, hint: str | None = None) -> str:
    """Return the secret in an environment variable.

    Args:
        variable: its name.
        where: location named in the error, such as the option that names the variable.
        hint: hint of the error. None suggests exporting the variable.

    Raises:
        UserInputError: if the variable is unset or empty.

    Example:
        >>> environment_key("NO_SUCH_KEY", where="judge.key_env")
        Traceback (most recent call last):
        rlhf_core.errors.UserInputError: judge.key_env: the environment variable NO_SUCH_KEY is not set
          -> export NO_SUCH_KEY=…
    """
    key = os.environ.get(variable)
    if not key:
        raise UserInputError(
            f"the environment variable {variable} is not set", where=where, hint=hint or f"export {variable}=…"
        )
    return key


def server_key(variable: str | None, *, where: str, example: str) -> str | None:
    """Return the key in the variable that `--api-key-env` names, or None if the server should create and print one.

    Args:
        variable: value of `--api-key-env`.
        where: location named in the error.
        example: name of a variable, for the hint.

    Raises:
        UserInputError: if the variable is not set, or if stderr is not a terminal that a new key can be printed to.
    """
    if variable is not None:
        return environment_key(variable, where="--api-key-env")
    if not sys.stderr.isatty():
        raise UserInputError(
            "a key must not be written to a log, and stderr is not a terminal to print it to",
            where=where,
            hint=f"export {example}=… and add --api-key-env {example}",
        )
    return None


def bound_socket(host: str, port: int, *, where: str) -> socket.socket:
    """Return a TCP socket that is bound to an address and does not listen yet.

    Args:
        host: IPv4 or IPv6 address, or a host name.
        port: port number. 0 selects a free port.
        where: location named in the error.

    Raises:
        UserInputError: if the address cannot be used.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise UserInputError(
            f"cannot listen at {host} port {port}: {error.strerror or error}",
            where=where,
            hint="choose another --port, or 0 for a free one",
        ) from None
    return bound


def address_parts(
    url: str,
    *,
    form: str = "http://HOST[:PORT]/PATH",
    schemes: Collection[str] = ("http", "https"),
    key_option: str | None = None,
) -> SplitResult:
    """Return the parts of a server's address. For validators of option fields.

    Args:
        url: the address.
        form: expected form, for the error message.
        schemes: allowed schemes.
        key_option: option that names a key's environment variable, suggested if the address contains credentials.

    Raises:
        ValueError: if the address is invalid or contains credentials.

    Example:
        >>> address_parts("http://judge:8000/v1").port
        8000
        >>> address_parts("http://user:secret@judge/v1", key_option="key_env")
        Traceback (most recent call last):
        ValueError: contains credentials, which would be written to files: name a variable in key_env instead
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"not an address: {error}") from None
    if parts.scheme not in schemes or not parts.hostname or port == 0:
        raise ValueError(f"should be {form} or https://…")
    if parts.username is not None or parts.password is not None:
        instead = "" if key_option is None else f": name a variable in {key_option} instead"
        raise ValueError(f"contains credentials, which would be written to files{instead}")
    return parts


def server_address(url: str) -> str:
    """Return the address of a server that paths are appended to, without a final slash. For option validators.

    Args:
        url: the address.

    Raises:
        ValueError: if the address is invalid, or contains credentials or a query.

    Example:
        >>> server_address("http://judge:8000/v1/")
        'http://judge:8000/v1'
    """
    parts = address_parts(url, key_option="key_env")
    if parts.query or parts.fragment:
        raise ValueError("contains a query, which would be written to files: name a variable in key_env instead")
    return url.rstrip("/")


def allowed_host(text: str) -> str:
    """Check an entry of a list of allowed hosts. For validators of option fields.

    Args:
        text: A host or address. `*.NAME` stands for all subdomains of a name, and `*` for all hosts.

    Returns:
        The entry in lower case.

    Raises:
        ValueError: It is not a host.

    Example:
        >>> allowed_host("*.Example.org")
        '*.example.org'
    """
    host = text.lower()
    if not _HOST.fullmatch(host):
        raise ValueError(f"{text!r:.80} is not a host: write images.example.org, *.example.org, an address, or *")
    return host


def is_loopback(host: str | None) -> bool:
    """Whether a host is a loopback address or `localhost`, which only processes of this machine can use.

    Args:
        host: address or host name. None counts as another machine.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("judge.example")
        (True, True, False)
    """
    if host is None or host == "localhost":
        return host is not None
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
