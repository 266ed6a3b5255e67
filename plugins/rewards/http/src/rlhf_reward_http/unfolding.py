"""Compressed answers, unfolded with a bound: a few bytes can stand for gigabytes."""

from __future__ import annotations

import zlib

ACCEPTED = "gzip, deflate"
"""Value of the header Accept-Encoding."""
_KNOWN = frozenset({"gzip", "x-gzip", "deflate"})
_ANY_HEADER = 32 + zlib.MAX_WBITS
"""zlib's way to say: a gzip or a zlib header."""


class UnfoldingError(ValueError):
    """The bytes are not what their encoding says, or too many."""


class Unfolder:
    """Takes an answer piece by piece; `content` never grows beyond the bound."""

    def __init__(self, encoding: str, max_bytes: int) -> None:
        """`encoding`: of the header, empty where there is none. Raises `UnfoldingError` for one that is not read."""
        name = encoding.strip().lower()
        if name not in (*_KNOWN, "", "identity"):
            raise UnfoldingError(f'its content encoding "{encoding[:40]}" is none of {ACCEPTED}')
        self.content = bytearray()
        self._name = name
        self._max_bytes = max_bytes
        self._stream = zlib.decompressobj(_ANY_HEADER) if name in _KNOWN else None

    def add(self, piece: bytes) -> None:
        """Take the next bytes of the answer. Raises `UnfoldingError`."""
        if self._stream is not None:
            try:
                piece = self._stream.decompress(piece, self._max_bytes - len(self.content) + 1)
            except zlib.error as error:
                raise UnfoldingError(f"is not {self._name}: {error}") from None
        self.content += piece[: self._max_bytes - len(self.content) + 1]
        if len(self.content) > self._max_bytes:
            raise UnfoldingError(f"is longer than {self._max_bytes:,} bytes")

    def finish(self) -> bytes:
        """The whole answer. Raises `UnfoldingError` where its end is missing."""
        if self._stream is not None and not self._stream.eof:
            raise UnfoldingError(f"is not {self._name}: its end is missing")
        return bytes(self.content)
