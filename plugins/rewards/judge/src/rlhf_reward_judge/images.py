"""Images of prompts in questions to a judge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_core.errors import UserInputError
from rlhf_core.types import Rollout

from .verdicts import Messages

MAX_EDGE = 1024
"""Maximum width and height of an image that a judge gets, in pixels."""


def check_images_installed() -> None:
    """Raise `UserInputError` if the library that reads images is not installed."""
    try:
        import rlhf_images  # noqa: F401  # an extra
    except ImportError as error:
        raise UserInputError(
            "the option needs a package that is not installed",
            where='reward "judge": images',
            hint="pip install 'rlhf-reward-judge[images]'",
        ) from error


def with_images(rollouts: Sequence[Rollout], questions: Sequence[Messages]) -> Iterator[Messages]:
    """Yield each question with the images of its rollout after the text. `[image 1]` in the text is the first one.

    Args:
        rollouts: The rollout of each question, in the process that sampled it.
        questions: The questions, whose last message contains the prompt.

    Raises:
        DataError: An image is missing or has changed.
    """
    from rlhf_images import KEY, image_address, open_images

    known: dict[str, str] = {}
    for rollout, messages in zip(rollouts, questions, strict=True):
        digests = [str(each["sha256"]) for each in rollout.metadata.get(KEY, ())]
        if any(digest not in known for digest in digests):
            opened = zip(digests, open_images(rollout), strict=True)
            known |= {digest: image_address(image, max_edge=MAX_EDGE) for digest, image in opened}
        yield _joined(messages, digests, known)


def _joined(messages: Messages, digests: Sequence[str], addresses: Mapping[str, str]) -> Messages:
    *others, last = messages
    parts: list[dict[str, Any]] = [{"type": "text", "text": _numbered(last["content"], digests)}]
    parts += [{"type": "image_url", "image_url": {"url": addresses[digest]}} for digest in digests]
    return [*others, {**last, "content": parts}]


def _numbered(text: str, digests: Sequence[str]) -> str:
    """Replace the markers of a prompt's images by their numbers. An answer may contain markers of other images."""
    from rlhf_images import find_markers

    numbers = {digest[:16]: number for number, digest in reversed([*enumerate(digests, start=1)])}
    for start, end, name in reversed(find_markers(text)):
        text = f"{text[:start]}[image {numbers.get(name, 'unknown')}]{text[end:]}"
    return text
