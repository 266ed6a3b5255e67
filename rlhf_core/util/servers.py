"""What bounds a server of this project, whatever it serves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The connections, bytes and time that clients may take."""

    max_connections: int = 256
    """Open connections; another is told 503 and closed."""
    max_body_bytes: int = 8 * 2**20
    max_bytes_in_flight: int = 16 * 2**20
    """Of all bodies at once; one that is larger waits until it is alone."""
    idle_seconds: float = 30.0
    """Longest time from a request's first byte to its last, headers and body together; longest silence before it."""
