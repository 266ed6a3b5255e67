"""Encoding of chats with images for a model that sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_core.errors import RlhfError
from rlhf_core.models import ModelKind
from rlhf_core.prompts import PromptEncoder
from rlhf_core.types import Prompt
from rlhf_episodes import Call, CallRefused, ChatFormat, template_messages

MAX_PIXELS = 2**22
"""Maximum width x height of an image. Decoding one takes up to 50 MB. Images are decoded one at a time."""
_CODE = "invalid_request"


class SeeingEncoder:
    """Encodes calls whose messages have images."""

    def __init__(self, tokenizer: Any, kind: ModelKind, chat: ChatFormat, *, engine_sees: bool) -> None:
        """Create an encoder.

        Args:
            tokenizer: The model's tokenizer.
            kind: The model's kind.
            chat: The tokenizer's format of chats.
            engine_sees: Whether the engine passes a prompt's columns to the model.
        """
        self._encoder = PromptEncoder(tokenizer, kind=kind)
        self._chat = chat
        self._sees = engine_sees and any(column.model_input for column in kind.columns.values())

    def prompt(self, call: Call) -> Prompt:
        """Encode a call: its ids, and the columns of its images.

        Raises:
            CallRefused: The model does not see, an image cannot be used, or the call has options that images exclude.
        """
        if not self._sees:
            raise CallRefused(400, _CODE, "messages: this model, or its engine, does not accept images")
        if call.tools:
            raise CallRefused(400, _CODE, "tools: a conversation with images cannot have tools")
        if call.top_logprobs is not None:
            raise CallRefused(400, _CODE, "logprobs: not available for a conversation with images")
        if any(each.tool_calls or each.role == "tool" for each in call.messages):
            raise CallRefused(400, _CODE, "messages: a conversation with images cannot contain tool calls")
        if not all(address.startswith("data:") for each in call.messages for _, address in each.images):
            message = "messages: an image must be a data: URL with base64 in the request itself"
            raise CallRefused(400, _CODE, message)
        try:
            from rlhf_images import ImageLimits, ImageReader, read_images
        except ImportError as error:
            message = "messages: images need a package on the server: pip install 'rlhf-serve[images]'"
            raise CallRefused(400, "not_installed", message) from error
        reader = ImageReader(ImageLimits(max_pixels=MAX_PIXELS), Path())
        try:
            messages = template_messages(call.messages, self._chat.tool_format)
            return self._encoder.prompt(read_images({"prompt": messages}, reader), 0, "messages")
        except RlhfError as error:
            raise CallRefused(400, _CODE, f"messages: {error.message}") from error


def has_images(call: Call) -> bool:
    """Return whether a message of the call has images."""
    return any(message.images for message in call.messages)
