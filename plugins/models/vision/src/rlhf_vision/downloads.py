"""Images at addresses, downloaded once and kept in the user's cache folder."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Collection
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock

from rlhf_images import ImageError, ImageLimits, decode_image
from rlhf_web import RemoteError, check_host, download

logger = logging.getLogger("rlhf.vision")
MAX_CACHE_BYTES = 20 * 2**30
"""Size of the cache beyond which the images that were used longest ago are removed."""
_PARTS = 64
"""The cache is measured each time that a process has added this part of its maximum size."""
_SECONDS = 60.0
"""Maximum time for an image, redirects and repeated attempts included."""


class ImageDownloads:
    """Returns the bytes of images at addresses of allowed hosts. May be called in several threads.

    A file of the cache is named by the SHA-256 of its address. Only images that can be decoded are kept. One that was
    removed from a full cache is downloaded again.
    """

    def __init__(self, hosts: Collection[str], limits: ImageLimits) -> None:
        """Create the cache folder.

        Args:
            hosts: Allowed hosts, as `rlhf_web.allowed_host` returns them.
            limits: Bounds on each image.
        """
        self._hosts = frozenset(hosts)
        self._limits = limits
        self._folder, self._temporary = _cache_folder()
        self._locks = tuple(Lock() for _ in range(64))
        """One for each group of addresses, so that threads do not download one address at once."""
        self._trimming = Lock()
        self._num_unmeasured = MAX_CACHE_BYTES
        """Bytes that were added since the cache was measured. The first download measures it."""

    def __call__(self, url: str) -> bytes:
        """Return the encoded image at an address. Raises `ImageError`."""
        digest = sha256(url.encode("utf-8", "surrogatepass"))
        path = self._folder / digest.hexdigest()
        try:
            check_host(url, self._hosts)  # another run may have allowed it
            with self._locks[digest.digest()[0] % len(self._locks)]:
                return self._kept(path) or self._download(url, path)
        except RemoteError as error:
            raise ImageError(f"the image cannot be downloaded: {error}", hint=_hint(error)) from None

    def _kept(self, path: Path) -> bytes:
        """Return an image of the cache, or nothing."""
        try:
            with path.open("rb") as file:
                with suppress(OSError):  # of another user
                    os.utime(path)
                return file.read(self._limits.max_bytes + 1)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise ImageError(f"the image cannot be read from {path}: {error.strerror or error}") from error

    def _download(self, url: str, path: Path) -> bytes:
        data = download(url, hosts=self._hosts, max_bytes=self._limits.max_bytes, seconds=_SECONDS)
        decode_image(data, self._limits)
        part = path.with_suffix(f".{os.getpid()}-{sha256(os.urandom(8)).hexdigest()[:8]}.part")
        try:
            part.write_bytes(data)
            part.replace(path)
        except OSError as error:
            raise ImageError(f"the image cannot be kept in {self._folder}: {error.strerror or error}") from error
        with self._trimming:
            self._num_unmeasured += len(data)
            if self._num_unmeasured * _PARTS >= MAX_CACHE_BYTES:
                self._num_unmeasured = 0
                self._trim()
        return data

    def _trim(self) -> None:
        """Remove the images that were used longest ago if the cache is too large."""
        found: list[tuple[float, int, str]] = []
        for entry in os.scandir(self._folder):
            with suppress(FileNotFoundError):  # another process has removed it
                found.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
        num_bytes = sum(size for _, size, _ in found)
        if num_bytes <= MAX_CACHE_BYTES:
            return
        logger.info("%s has more than %d MiB: images used long ago are removed", self._folder, MAX_CACHE_BYTES >> 20)
        for _, size, path in sorted(found):
            if num_bytes * _PARTS <= MAX_CACHE_BYTES * (_PARTS - 4):
                return
            with suppress(OSError):
                os.unlink(path)
                num_bytes -= size


def _hint(error: RemoteError) -> str:
    """Return what to do about a download that failed."""
    variables = {name.upper() for name in os.environ} & {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"}
    if not (error.is_lost and variables):
        return "see prompts.allow_hosts"
    return f"{min(variables)} is set, but proxies are not used: download the images yourself, and give their paths"


def _cache_folder() -> tuple[Path, tempfile.TemporaryDirectory[str] | None]:
    """Return the user's cache of images, or a temporary folder if the user cannot have one."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf" / "images"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder, None
    except (OSError, RuntimeError):  # such as an arbitrary user id in a container
        pass
    temporary = tempfile.TemporaryDirectory(prefix="rlhf-images-")
    return Path(temporary.name), temporary
