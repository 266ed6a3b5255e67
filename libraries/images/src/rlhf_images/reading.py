"""Reading of images that records name: a path, an address, base64, bytes, or a Pillow image."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import first_line

from .decode import DecompressionBomb, ImageError, check_image, decode_image, to_rgb
from .limits import ImageLimits
from .references import ImageReference

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageReader:
    """Turns the images of records into references, with bounds on each.

    All checks but those of the pixels themselves are made when a reference is made, and pixels are decoded when it is
    opened.

    Example:
        reader = ImageReader(ImageLimits(max_pixels=2**20), Path("data"))
        reference = reader.read("digits/0.png")
    """

    def __init__(self, limits: ImageLimits, folder: Path, fetch: Callable[[str], bytes] | None = None) -> None:
        """Create a reader.

        Args:
            limits: Bounds on each image.
            folder: Folder of relative paths. Paths outside of it are refused.
            fetch: Returns the bytes at an http or https address, quickly if they were fetched before, or raises
                `ImageError`. None refuses addresses.
        """
        self.limits = limits
        self.folder = folder.resolve()
        self._fetch = fetch

    def read(self, value: object) -> ImageReference:
        """Read one image.

        Args:
            value: A path, `data:` address, bytes, Pillow image, or a mapping with one of the keys `image`, `path`,
                `bytes`, `base64`, `url` or `image_url`, as in chat messages and in `datasets`.

        Raises:
            ImageError: The image cannot be used.
        """
        if isinstance(value, ImageReference):
            return value
        if isinstance(value, Mapping):
            value = _value_of(value)
            value = _value_of(value) if isinstance(value, Mapping) else value  # image_url: {url: …}
        if isinstance(value, bytes | bytearray):
            return self._from_bytes(bytes(value), {})
        if isinstance(value, str | Path):
            return self._from_text(str(value))
        if hasattr(value, "convert") and hasattr(value, "tobytes"):
            return self._from_pillow(value)
        raise ImageError(f"an image is a {type(value).__name__}, not a path, base64, bytes or Pillow image")

    def _from_text(self, text: str) -> ImageReference:
        if text.startswith("data:"):
            return self._from_bytes(_from_base64(text.partition(",")[2], self.limits), {})
        if text.startswith(("http://", "https://")):
            if self._fetch is None:
                problem, hint = (
                    f"the image is an address ({text:.80})",
                    "download it and give its path, or allow its host",
                )
                raise ImageError(problem, hint=hint)
            return self._from_bytes(self._fetch(text), {}, partial(self._fetch, text))
        path = self._path(text)
        return self._from_bytes(self._read_file(path, text), {"path": text}, partial(self._read_file, path, text))

    def _from_bytes(
        self, data: bytes, values: Mapping[str, Any], again: Callable[[], bytes] | None = None
    ) -> ImageReference:
        """Return the reference of encoded bytes. `again` reads them when it is opened, None keeps them."""
        (width, height), digest = check_image(data, self.limits), sha256(data).hexdigest()
        description = {"sha256": digest, "width": width, "height": height, **values}
        return ImageReference.of(description, partial(_decode_again, again or (lambda: data), digest, self.limits))

    def _from_pillow(self, image: Any) -> ImageReference:
        width, height = image.size
        if width * height > self.limits.max_pixels:  # Pillow may have opened a file without decoding it yet
            raise DecompressionBomb(
                f"the image has {width} x {height} pixels, at most {self.limits.max_pixels:,} are allowed"
            )
        try:
            plain = to_rgb(image)
        except Exception as error:  # a lazily opened file may be broken
            raise ImageError(f"the image cannot be decoded: {first_line(error)}") from error
        digest = sha256(f"{width}x{height}:".encode() + plain.tobytes()).hexdigest()
        return ImageReference.of({"sha256": digest, "width": width, "height": height}, plain.copy)

    def _path(self, text: str) -> Path:
        try:
            path = (self.folder / text).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # an invalid character, or a loop of links
            raise ImageError(f"the path {text!r:.80} of an image cannot be used: {first_line(error)}") from error
        if not path.is_relative_to(self.folder):
            raise ImageError(f"the image {text!r:.80} is outside of {self.folder}", hint="set prompts.folder")
        return path

    def _read_file(self, path: Path, name: str) -> bytes:
        try:
            if not path.is_file():
                raise ImageError(
                    f"there is no image {name!r:.80} in {self.folder}", hint="paths start at prompts.folder"
                )
            with path.open("rb") as file:
                return file.read(self.limits.max_bytes + 1)
        except (OSError, ValueError) as error:
            raise ImageError(f"the image {name!r:.80} cannot be read: {first_line(error)}") from error


def _value_of(part: Mapping[str, Any]) -> object:
    """Return the image in a mapping, such as `{"bytes": …, "path": …}` of `datasets` or a part of a chat message."""
    for key in ("bytes", "image", "path", "url", "image_url"):
        if part.get(key) is not None:
            value: object = part[key]
            return value
    if isinstance(encoded := part.get("base64"), str):
        return f"data:,{encoded}"
    known = ", ".join(map(str, part)) or "none"
    raise ImageError(f"an image part lacks an image (keys: {known})", hint="give it as image, path, base64 or url")


def _from_base64(text: str, limits: ImageLimits) -> bytes:
    if len(text) > limits.max_bytes * 4 // 3 + 4:
        raise ImageError(f"the image has more than {limits.max_bytes:,} bytes", hint="raise limits.max_bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the image is not base64: {error}") from error


def _decode_again(read: Callable[[], bytes], digest: str, limits: ImageLimits) -> Image:
    data = read()
    if sha256(data).hexdigest() != digest:
        raise ImageError("the image has changed since the run started", hint="restore it, or start a new run")
    return decode_image(data, limits)
