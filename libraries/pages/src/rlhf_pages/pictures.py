"""Small copies of the images of samples, in the folder `images` of a run. `samples.jsonl` refers to them by markers."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MAX_PICTURE_BYTES = 256 * 2**10
"""Maximum size of a file. Larger ones are neither written nor shown."""
_PNG = b"\x89PNG\r\n\x1a\n"
_NAME = re.compile(r"[0-9a-f]{16}")
_MARKER = re.compile(r"<image:([0-9a-f]{16})>")


def picture_path(run_folder: Path, name: str) -> Path:
    """Return the file of a picture.

    Args:
        run_folder: The run's folder.
        name: First 16 digits of the image's SHA-256, as in its marker `<image:…>`.

    Example:
        >>> picture_path(Path("run"), "00112233445566aa").as_posix()
        'run/images/00112233445566aa.png'
    """
    return run_folder / "images" / f"{name}.png"


def read_picture(run_folder: Path, name: str) -> bytes | None:
    """Return a picture of a run as PNG, None if it is missing, too large or of another format.

    Args:
        run_folder: The run's folder, whose files are untrusted.
        name: Name of the picture, also untrusted.
    """
    if not _NAME.fullmatch(name):
        return None
    path = picture_path(run_folder, name)
    try:
        if path.parent.is_symlink():
            return None
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            return None
        data = file.read(MAX_PICTURE_BYTES + 1)
    return data if len(data) <= MAX_PICTURE_BYTES and data.startswith(_PNG) else None


def picture_names(samples: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the pictures in the prompts and turns of samples, each once, in order.

    Args:
        samples: Lines of `samples.jsonl`, as `known_sample` returns them.

    Example:
        >>> picture_names([{"prompt": "<image:00112233445566aa>Which digit?"}])
        ['00112233445566aa']
    """
    texts = [text for each in samples for text in (each.get("prompt"), *_turn_texts(each))]
    return list(dict.fromkeys(name for text in texts for name in _MARKER.findall(str(text or ""))))


def _turn_texts(sample: Mapping[str, Any]) -> list[Any]:
    return [turn.get("text") for turn in sample.get("turns") or () if isinstance(turn, Mapping)]
