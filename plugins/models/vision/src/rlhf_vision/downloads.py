"""Images at addresses, downloaded once and kept in the user's cache folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from threading import Lock

from rlhf_images import ImageError, ImageLimits, decode_image
from rlhf_web import RemoteError, check_host, download

_SECONDS = 60.0
"""Maximum time for an image, redirects and repeated attempts included."""


class ImageDownloads:
    """Returns the bytes of images at addresses of allowed hosts. May be called in several threads.

    A file of the cache is named by the SHA-256 of its address. Only images that can be decoded are kept.
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

    def __call__(self, url: str) -> bytes:
        """Return the encoded image at an address. Raises `ImageError`."""
        digest = sha256(url.encode("utf-8", "surrogatepass"))
        path = self._folder / digest.hexdigest()
        try:
            check_host(url, self._hosts)  # another run may have allowed it
            with self._locks[digest.digest()[0] % len(self._locks)]:
                return self._kept(path) or self._download(url, path)
        except RemoteError as error:
            raise ImageError(f"the image cannot be downloaded: {error}", hint="see prompts.allow_hosts") from None

    def _kept(self, path: Path) -> bytes:
        """Return an image of the cache, or nothing."""
        try:
            with path.open("rb") as file:
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
        return data


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
