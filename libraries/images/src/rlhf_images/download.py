"""Downloads of images, for runs that allow addresses."""

from __future__ import annotations

import time
import urllib.request
from urllib.error import URLError

from .decode import ImageError

_BLOCK = 65_536


class _NoOtherScheme(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        if not newurl.startswith(("http://", "https://")):
            raise URLError(f"redirected to {newurl:.80}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(url: str, *, max_bytes: int, timeout_seconds: float) -> bytes:
    """Download at most `max_bytes` + 1 bytes. Raises `ImageError` on failure or at the deadline."""
    deadline = time.monotonic() + timeout_seconds
    blocks: list[bytes] = []
    opener = urllib.request.build_opener(_NoOtherScheme)
    try:
        with opener.open(url, timeout=timeout_seconds) as response:
            while sum(map(len, blocks)) <= max_bytes and (block := response.read1(_BLOCK)):
                blocks.append(block)
                if time.monotonic() > deadline:
                    raise ImageError(f"{url:.80} did not send the image within {timeout_seconds:g} seconds")
    except (OSError, ValueError) as error:
        raise ImageError(f"{url:.80} cannot be downloaded: {error}", hint="check the address") from error
    return b"".join(blocks)[: max_bytes + 1]
