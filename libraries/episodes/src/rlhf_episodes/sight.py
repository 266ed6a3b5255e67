"""Images in an episode's messages: they are read within bounds, and become tokens and inputs of a model that sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary

from rlhf_core.columns import Column, Columns
from rlhf_core.errors import DataError
from rlhf_core.types import Message, Prompt

from .contents import images_of, is_image, parts_of, text_of
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

            encoded = [kind.encode_image(image) for image in images]  # in another thread
            text, inputs = kind.place_images(rendered_observation, encoded)
            row.give(encode(text))
            request_inputs = {**prompt_inputs, **kind.observed_images([(num_tokens_before, inputs)])}
    """

    columns: Mapping[str, Column]
    """Columns of a prompt, each of which `place_images` or `observed_images` returns."""

    def encode_image(self, image: Any) -> Any:
        """Decode an image and process it for the model. Called in any thread, in one at a time.

        Args:
            image: Reference of the image.

        Returns:
            An object for `place_images`, which can be weakly referenced.

        Raises:
            DataError: The image cannot be used.
        """

    def place_images(self, text: str, images: Sequence[Any]) -> tuple[str, Mapping[str, Any]]:
        """Return a rendered text with the tokens of its images, and the columns of a prompt with these images.

        Args:
            text: Text of the chat template, with a placeholder for each image.
            images: Results of `encode_image` in order. They may be shared, and are not changed.

        Returns:
            The text, and column name -> value.

        Raises:
            DataError: The text has more or fewer placeholders.
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


@dataclass(slots=True)
class Seen:
    """Images of one episode, by digest."""

    references: dict[str, ImageReference] = field(default_factory=dict)
    """Those of the prompt first."""
    encoded: dict[str, Any] = field(default_factory=dict)
    """Results of `SeeingKind.encode_image`."""


class Sight:
    """Reads the images of a run's episodes. Samples that see the same images after the same text share their inputs."""

    def __init__(
        self, kind: SeeingKind, limits: ImageLimits, folder: Path, fetch: Callable[[str], bytes] | None = None
    ) -> None:
        """Prepare to read images.

        Args:
            kind: Kind of the policy's model.
            limits: Bounds on each image, and on the number of new images of an observation.
            folder: Folder of relative paths. Paths outside of it are refused.
            fetch: Returns the bytes at an http or https address. None refuses addresses.
        """
        from rlhf_images import ImageReader  # installed together with a kind that sees

        self._kind = kind
        self.max_images = limits.max_images
        """Maximum number of new images of one observation, or of one call of an agent."""
        self._reader = ImageReader(limits, folder, fetch)
        self._placed: WeakValueDictionary[tuple[str, tuple[str, ...]], PlacedImages] = WeakValueDictionary()
        self._encoded: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._one_at_a_time = Lock()
        """Bounds memory: an image takes much more while it is decoded."""

    def read(self, messages: Sequence[Message], seen: Seen, opens: bool) -> list[Message]:
        """Return messages with references in their image parts. Called in any thread, since images are encoded here.

        A part with `required: False` whose image cannot be used becomes a text with the reason.

        Args:
            messages: Messages of an environment or an agent.
            seen: Images of the episode. New ones are added.
            opens: Whether the messages may open a row, which needs the earlier images too.

        Raises:
            DataError: An image cannot be used, or there are too many new ones.
        """
        for reference in list(seen.references.values()) if opens else ():
            self._encode(reference, seen)
        new = [part for part in images_of(messages) if _digest_of(part) not in seen.references]
        late = new[self.max_images :]
        excess = f"an observation has {len(new)} images, at most {self.max_images} are allowed"
        if any(part.get("required", True) for part in late):
            raise DataError(excess, hint="show fewer images in a turn, or raise prompts.limits.max_images")
        late_ids = set(map(id, late))
        read = []
        for each in messages:
            if images_of([each]):
                parts = [
                    _not_shown(excess) if id(part) in late_ids else self._read_part(part, seen)
                    for part in each["content"]
                ]
                each = {**each, "content": parts if any(map(is_image, parts)) else text_of(parts)}
            read.append(each)
        return read

    def _read_part(self, part: Any, seen: Seen) -> Any:
        if not is_image(part):
            return part
        try:
            reference = seen.references.get(_digest_of(part)) or self._reader.read(part)
            self._encode(reference, seen)
        except DataError as error:
            if part.get("required", True):
                raise
            return _not_shown(error.message)
        return {"type": "image", "image": seen.references.setdefault(reference["sha256"], reference)}

    def _encode(self, reference: ImageReference, seen: Seen) -> Any:
        """Return the encoded image, and keep it in `seen`. Samples that see it share it."""
        digest = str(reference["sha256"])
        if (encoded := seen.encoded.get(digest)) is None:
            with self._one_at_a_time:
                if (encoded := self._encoded.get(digest)) is None:
                    encoded = self._encoded[digest] = self._kind.encode_image(reference)
            seen.encoded[digest] = encoded
        return encoded

    def with_images(self, messages: Sequence[Message], prompt: Prompt) -> tuple[Message, ...]:
        """Return messages of a prompt with image parts in place of the markers in their texts.

        Args:
            messages: Messages of the prompt, as its source returns them, or of an agent. They may have image parts.
            prompt: The prompt.
        """
        references = list(prompt.metadata.get(IMAGES) or ())
        placed = []
        for each in messages:
            if references and isinstance(each.get("content"), str | list):
                parts = list(_split(each["content"], references))
                each = {**each, "content": parts} if any(map(is_image, parts)) else each
            placed.append(each)
        return tuple(placed)

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

    def place(self, text: str, messages: Sequence[Message], seen: Seen) -> PlacedImages:
        """Put the tokens of images into a rendered text. This is quick if `read` has encoded the images.

        Args:
            text: The chat template's rendering of `bare(messages)`.
            messages: Messages that were read.
            seen: Images of the episode.

        Raises:
            DataError: The template has left out an image, or an image cannot be decoded.
        """
        images = [part["image"] for part in images_of(messages)]
        key = text, tuple(str(each["sha256"]) for each in images)
        if (placed := self._placed.get(key)) is None:
            encoded = [self._encode(each, seen) for each in images]
            placed = self._placed[key] = PlacedImages(*self._kind.place_images(text, encoded))
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


def _not_shown(reason: str) -> Mapping[str, str]:
    return {"type": "text", "text": f"[image not shown: {reason}]"}


def _digest_of(part: Any) -> str:
    """Return the digest of an image part that was read, else an empty text."""
    value = part.get("image")
    # A reference that was shown to the environment, possibly in another process, comes back as a mapping.
    return str(value.get("sha256", "")) if isinstance(value, Mapping) else ""


def _split(content: str | Sequence[Any], references: list[ImageReference]) -> Iterator[Any]:
    """Yield text and image parts of a content with markers, and remove their images from `references`."""
    for part in parts_of(content):
        if isinstance(part, Mapping) and part.get("type") == "text":
            yield from _split_text(str(part.get("text", "")), references)
        else:
            yield part


def _split_text(text: str, references: list[ImageReference]) -> Iterator[Mapping[str, Any]]:
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


def with_seen(prompt: Prompt, conversations: Iterable[Sequence[Message]]) -> Prompt:
    """Return a prompt whose metadata has the references of all images of an episode, those of the prompt first.

    Args:
        prompt: The prompt of the episode.
        conversations: Messages of each branch.
    """
    own = list(prompt.metadata.get(IMAGES) or ())
    shown = [part["image"] for messages in conversations for part in images_of(messages)]
    added = {each["sha256"]: each for each in shown}
    for each in own:
        added.pop(each["sha256"], None)
    if not added:
        return prompt
    changed: Prompt = replace(prompt, metadata={**prompt.metadata, IMAGES: [*own, *added.values()]})
    return changed
