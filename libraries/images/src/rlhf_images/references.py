"""References to images: the form in which records, rollouts and texts contain them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import DataError
from rlhf_core.types import Rollout

if TYPE_CHECKING:
    from PIL.Image import Image

KEY = "images"
"""Key of a record, and of a rollout's metadata, with the references of its prompt in order."""
_MARKER = re.compile(r"<image:([0-9a-f]{16})>")


class ImageReference(dict[str, Any]):
    """A mapping of JSON values that describes an image: `sha256`, `width`, `height`, and `path` if it has one.

    In the process that read it, it can also be opened. A copy in a file or another process is a plain mapping.
    """

    _load: Callable[[], Image]

    @classmethod
    def of(cls, values: Mapping[str, Any], load: Callable[[], Image]) -> ImageReference:
        """Create a reference.

        Args:
            values: The description.
            load: Decodes the image to RGB.
        """
        reference = cls(values)
        reference._load = load
        return reference

    @property
    def marker(self) -> str:
        """Text that stands for the image in a prompt."""
        return f"<image:{self['sha256'][:16]}>"

    def open(self) -> Image:
        """Return the image in RGB. Raises `ImageError` if it has changed or is missing."""
        return self._load()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def find_markers(text: str) -> list[tuple[int, int, str]]:
    """Find the markers of images in a text.

    Args:
        text: Any text.

    Returns:
        Start, end, and the first 16 digits of the image's `sha256`, in order.

    Example:
        >>> find_markers("<image:00112233445566aa>Which?")
        [(0, 24, '00112233445566aa')]
    """
    return [(each.start(), each.end(), each[1]) for each in _MARKER.finditer(text)]


def open_images(rollout: Rollout) -> list[Image]:
    """Return the images of a rollout's prompt, in the process that sampled it. Rewards are called there.

    Args:
        rollout: A rollout of a prompt from the source `images`.

    Raises:
        DataError: The rollout is a copy, whose images are descriptions only.
    """
    references = rollout.metadata.get(KEY, [])
    if not all(isinstance(each, ImageReference) for each in references):
        raise DataError(
            "the images of a rollout can be opened only in the process that sampled it",
            where=f"sample {rollout.sample_id}",
            hint="set isolate: false for this reward, or read `path` and `sha256` in rollout.metadata['images']",
        )
    return [each.open() for each in references]
