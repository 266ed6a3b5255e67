"""Addresses of this machine."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(host: str | None) -> bool:
    """Whether an address is a loopback address, so that all processes that use it are on this machine."""
    if host is None or host == "localhost":
        return host is not None
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
