"""Take secrets out of what is written or shown: run files, commands, texts with addresses in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_SECRET = re.compile(
    r"(^|[_.-])(api_?key|secret|passwd|password|credentials?|authorization|bearer|"
    r"(access|auth|hf|hub|private|wandb)_?(token|key)|token)$",
    re.IGNORECASE,
)


_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")


_HIDDEN = "***"


def redact_command(command: Sequence[str]) -> list[str]:
    """The command with the values of keys that name a secret, and passwords in addresses, taken out."""
    shown: list[str] = []
    hide_next = False
    for word in command:
        key, equals, _value = word.partition("=")
        if hide_next:
            shown.append(_HIDDEN)
            hide_next = False
        elif equals and _SECRET.search(key):
            shown.append(f"{key}={_HIDDEN}")
        else:
            hide_next = word.startswith("-") and bool(_SECRET.search(word))
            shown.append(redact_text(word))
    return shown


def redact_mapping(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a run file without the values of keys that name a secret, for places it is shown in."""
    return {
        key: _HIDDEN if _SECRET.search(str(key)) and value is not None else _redact(value)
        for key, value in config.items()
    }


def _redact(value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact_mapping(value)
    if isinstance(value, list | tuple):
        return [_redact(entry) for entry in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """The text without the credentials of addresses in it."""
    return _USERINFO.sub(f"{_HIDDEN}@", text)
