"""Decoding of untrusted images, with bounds on memory and time."""

from __future__ import annotations

import struct
import warnings
from io import BytesIO
from threading import Lock
from typing import TYPE_CHECKING

from rlhf_core.errors import DataError, first_line

from .limits import ImageLimits

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_SCANS = 64
"""Maximum number of scans of a JPEG file. Each one passes over all pixels. Encoders write about ten."""
_MAX_CHUNKS = 20_000
"""Maximum number of chunks of a PNG file. Pillow handles each in Python."""
_ORIENTATION = 0x0112
"""EXIF tag: values above 4 swap width and height."""
_TURNED = "rlhf_turned"
_ONE_AT_A_TIME = Lock()
"""Filters of warnings are those of the process: threads would restore each other's. It also bounds memory."""
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8"
_START_OF_SCAN = b"\xff\xda"


class ImageError(DataError):
    """An image cannot be used. Its message contains the reason."""


class DecompressionBomb(ImageError):
    """An image would take much more memory or time to decode than its bytes suggest."""


def decode_image(data: bytes, limits: ImageLimits | None = None) -> Image:
    """Decode an image to RGB. Size, format and structure are checked before pixels are decoded.

    The first frame of an animation is used, and a camera's orientation is applied.

    Args:
        data: The encoded image.
        limits: Bounds. None for the defaults.

    Returns:
        A Pillow image in the mode RGB, without a file.

    Raises:
        DecompressionBomb: The image has too many pixels, scans or chunks.
        ImageError: It is too large, of another format, or broken.

    Example:
        >>> from PIL import Image
        >>> file = BytesIO()
        >>> Image.new("L", (4, 2), 255).save(file, "PNG")
        >>> decode_image(file.getvalue()).size
        (4, 2)
    """
    return _read(data, limits or ImageLimits(), decode=True)


def check_image(data: bytes, limits: ImageLimits) -> tuple[int, int]:
    """Check an image as far as possible without decoding pixels, and return the width and height that it will have.

    Raises the errors of `decode_image`, except those of broken pixels.
    """
    image = _read(data, limits, decode=False)
    width, height = image.size
    return (height, width) if image.info.get(_TURNED) else (width, height)


def _read(data: bytes, limits: ImageLimits, *, decode: bool) -> Image:
    """Open an image after all checks. With `decode`, return it in RGB and without a file."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(data) > limits.max_bytes:
        raise ImageError(
            f"the image has {len(data):,} bytes, at most {limits.max_bytes:,} are allowed",
            hint="raise limits.max_bytes",
        )
    _check_structure(data)
    try:
        with _ONE_AT_A_TIME, warnings.catch_warnings():  # of broken metadata
            warnings.simplefilter("ignore")
            with Image.open(BytesIO(data), formats=[each.upper() for each in limits.formats]) as image:
                _check_size(image.size, limits)
                if not decode:
                    image.info[_TURNED] = image.getexif().get(_ORIENTATION, 1) > 4
                    return image
                image.load()
                return to_rgb(ImageOps.exif_transpose(image))
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise DecompressionBomb(f"the image has too many pixels: {first_line(error)}") from error
    except UnidentifiedImageError:
        formats = ", ".join(limits.formats)
        raise ImageError(f"the image is not of the formats {formats}, or is broken", hint="convert it to PNG") from None
    except Exception as error:  # decoders raise many classes for broken files
        raise ImageError(f"the image cannot be decoded: {first_line(error)}") from error


def to_rgb(image: Image) -> Image:
    """Convert a decoded image to RGB. 16-bit gray values are scaled to 8 bits.

    Args:
        image: A Pillow image of any mode.
    """
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value / 256).convert("L")
    return image.convert("RGB") if image.mode != "RGB" else image.copy()


def _check_size(size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ImageError(f"the image has the size {width} x {height}")
    if width * height > limits.max_pixels:
        raise DecompressionBomb(
            f"the image has {width} x {height} pixels, at most {limits.max_pixels:,} are allowed",
            hint="make it smaller, or raise limits.max_pixels",
        )


def _check_structure(data: bytes) -> None:
    """Raise `DecompressionBomb` for files whose structure makes decoders slow."""
    # Entropy-coded data never contains this marker, since it escapes each 0xff.
    if data.startswith(_JPEG) and (scans := data.count(_START_OF_SCAN)) > _MAX_SCANS:
        raise DecompressionBomb(f"the JPEG image has {scans} scans, at most {_MAX_SCANS} are allowed")
    if data.startswith(_PNG) and _num_chunks(data) > _MAX_CHUNKS:
        raise DecompressionBomb(f"the PNG image has more than {_MAX_CHUNKS:,} chunks")


def _num_chunks(data: bytes) -> int:
    place, count = len(_PNG), 0
    while place + 8 <= len(data) and count <= _MAX_CHUNKS:
        place += 12 + int(struct.unpack_from(">I", data, place)[0])
        count += 1
    return count
