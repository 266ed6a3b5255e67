"""Addresses of servers in options."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit


def address_parts(
    url: str, *, form: str = "http://HOST[:PORT]/PATH", schemes: Collection[str] = ("http", "https")
) -> SplitResult:
    """The parts of a server's address, for a field's validator. Raises `ValueError` where it is none of this form."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"no address: {error}") from None
    if parts.scheme not in schemes or not parts.hostname or port == 0:
        raise ValueError(f"should be {form} or https://…")
    return parts
