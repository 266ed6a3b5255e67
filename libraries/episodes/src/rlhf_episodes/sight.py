"""Images in an episode's messages: they are read within bounds, and become tokens and inputs of a model that sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary

from rlhf_core.columns import Column, Columns
from rlhf_core.errors import DataError
from rlhf_core.types import Message, Prompt

from .contents import images_of, is_image
from .row import EpisodeRow, PlacedImages

if TYPE_CHECKING:
    from rlhf_images import ImageLimits, ImageReference

IMAGES = "images"
"""Key of a prompt's metadata with the references of its images, in order."""


@runtime_checkable
class SeeingKind(Protocol):
    """A `ModelKind` whose models see images anywhere in a conversation.

    Example:
        An episode uses it like this::

            text, inputs = kind.place_images(rendered_observation, images)
            row.give(encode(text))
            request_inputs = {**prompt_inputs, **kind.observed_images([(num_tokens_before, inputs)])}
    """

    columns: Mapping[str, Column]
    """Columns of a prompt, each of which `place_images` or `observed_images` returns."""

    def place_images(self, text: str, images: Sequence[Any]) -> tuple[str, Mapping[str, Any]]:
        """Return a rendered text with the tokens of its images, and the columns of a prompt with these images.

        Args:
            text: Text of the chat template, with a placeholder for each image.
            images: References of the images in order.

        Returns:
            The text, and column name -> value.

        Raises:
            DataError: The text has more or fewer placeholders, or an image cannot be used.
        """

    def observed_images(self, parts: Sequence[tuple[int, Mapping[str, Any]]]) -> Mapping[str, Any]:
        """Return the columns of images that observations have added to a row.

        Args:
            parts: For each observation with images, the number of tokens of the row before it, and the columns of
                `place_images`.

        Returns:
            Column name -> value.
        """

    def without_placeholders(self, text: str) -> str:
        """Return a text without the tokens that stand for images, which the policy might have written.

        Args:
            text: Text of a message.
        """


class Sight:
    """Reads the images of a run's episodes. Samples that see the same images after the same text share their inputs."""

    def __init__(self, kind: SeeingKind, limits: ImageLimits, folder: Path) -> None:
        """Prepare to read images.

        Args:
            kind: Kind of the policy's model.
            limits: Bounds on each image, and on the number of images of an observation.
            folder: Folder of relative paths. Paths outside of it are refused.
        """
        from rlhf_images import ImageReader  # installed together with a kind that sees

        self._kind = kind
        self._reader = ImageReader(limits, folder)
        self._placed: WeakValueDictionary[tuple[str, tuple[str, ...]], PlacedImages] = WeakValueDictionary()

    def read(self, messages: Sequence[Message], known: MutableMapping[str, ImageReference]) -> list[Message]:
        """Return messages with references in their image parts.

        Args:
            messages: Messages of an environment.
            known: Digest -> reference, of the images of the episode. New ones are added.

        Raises:
            DataError: An image cannot be used, or there are too many.
        """
        if (count := len(images_of(messages))) > self._reader.limits.max_images:
            problem = f"an observation has {count} images, at most {self._reader.limits.max_images} are allowed"
            raise DataError(problem, hint="show fewer images in a turn, or raise prompts.limits.max_images")
        return [
            {**each, "content": [self._read_part(part, known) for part in each["content"]]}
            if images_of([each])
            else each
            for each in messages
        ]

    def _read_part(self, part: Any, known: MutableMapping[str, ImageReference]) -> Any:
        if not is_image(part):
            return part
        value = part.get("image")
        # A reference that was shown to the environment, possibly in another process, comes back as a mapping.
        digest = str(value.get("sha256")) if isinstance(value, Mapping) else ""
        reference = known[digest] if digest in known else self._reader.read(part)
        return {"type": "image", "image": known.setdefault(reference["sha256"], reference)}

    def with_images(self, messages: Sequence[Message], prompt: Prompt) -> tuple[Message, ...]:
        """Return messages of a prompt with image parts in place of the markers in their texts.

        Args:
            messages: Messages of the prompt, as its source returns them.
            prompt: The prompt.
        """
        references = list(prompt.metadata.get(IMAGES) or ())
        return tuple(
            {**each, "content": list(_split(each["content"], references))}
            if references and isinstance(each.get("content"), str)
            else each
            for each in messages
        )

    def bare(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages for the chat template: without references, and without texts that could pass for images."""
        return [dict(self._bare(each)) for each in messages]

    def _bare(self, value: Any) -> Any:
        if is_image(value):
            return {"type": "image"}
        if isinstance(value, str):
            return self._kind.without_placeholders(value)
        if isinstance(value, Mapping):
            return {key: self._bare(each) for key, each in value.items()}
        return [self._bare(each) for each in value] if isinstance(value, list | tuple) else value

    def place(self, text: str, messages: Sequence[Message]) -> PlacedImages:
        """Put the tokens of images into a rendered text.

        Args:
            text: The chat template's rendering of `bare(messages)`.
            messages: Messages that were read.

        Raises:
            DataError: The template has left out an image, or an image cannot be decoded.
        """
        images = [part["image"] for part in images_of(messages)]
        key = text, tuple(str(each["sha256"]) for each in images)
        if (placed := self._placed.get(key)) is None:
            placed = self._placed[key] = PlacedImages(*self._kind.place_images(text, images))
        return placed

    def columns(self, row: EpisodeRow) -> Columns:
        """Return the columns of a row that differ from those of its prompt.

        Args:
            row: A row of an episode.
        """
        values: dict[str, Any] = {} if row.opening is None else dict(row.opening.inputs)
        if row.observed:
            values |= self._kind.observed_images(row.observed_parts)
        return Columns(values, self._kind.columns)


def _split(text: str, references: list[ImageReference]) -> Iterator[Mapping[str, Any]]:
    """Yield text and image parts of a text with markers, and remove their images from `references`."""
    from rlhf_images import find_markers

    place = 0
    for start, end, digest in find_markers(text):
        if references and references[0]["sha256"].startswith(digest):
            if start > place:
                yield {"type": "text", "text": text[place:start]}
            yield {"type": "image", "image": references.pop(0)}
            place = end
    if place < len(text) or not place:
        yield {"type": "text", "text": text[place:]}


def with_seen(prompt: Prompt, seen: Mapping[str, ImageReference]) -> Prompt:
    """Return a prompt whose metadata has the references of all images of an episode, those of the prompt first.

    Args:
        prompt: The prompt of the episode.
        seen: Digest -> reference, in the order in which the policy saw them.
    """
    own = list(prompt.metadata.get(IMAGES) or ())
    digests = {each["sha256"] for each in own}
    added = [each for digest, each in seen.items() if digest not in digests]
    if not added:
        return prompt
    changed: Prompt = replace(prompt, metadata={**prompt.metadata, IMAGES: [*own, *added]})
    return changed
