"""Messages of an isolated environment as JSON values. Images become `data:` addresses."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.types import Message

from ..contents import images_of, is_image


def sendable(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages whose images are texts.

    Args:
        messages: Messages of an environment.
    """
    return [
        {**each, "content": [_sendable_part(part) for part in each["content"]]} if images_of([each]) else dict(each)
        for each in messages
    ]


def _sendable_part(part: Any) -> Any:
    if not is_image(part):
        return part
    value, rest = part.get("image", part.get("bytes")), {key: part[key] for key in ("required",) if key in part}
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        value = value["bytes"]
    if isinstance(value, bytes | bytearray):
        return {"type": "image", **rest, "image": f"data:,{b64encode(value).decode()}"}
    if isinstance(value, Path):
        return {"type": "image", **rest, "image": str(value)}
    if hasattr(value, "convert") and hasattr(value, "size"):  # a Pillow image
        from rlhf_images import image_address

        return {"type": "image", **rest, "image": image_address(value, max_edge=max(value.size))}
    return part
