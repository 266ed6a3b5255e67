"""Makes text safe to write or show: without secrets, and without characters that control a terminal.

A secret is recognized by its place (a key that names one, credentials or a query in a URL, a header). `learn` then
remembers its value, so that `redact_text` removes it from any later text, such as another library's error. It is
replaced by `***`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

HIDDEN = "***"
"""Replacement of a secret."""

_WORDS = (
    r"api[_-]?key|secret|passwd|password|passphrase|pwd|credentials?|authorization|auth|bearer|cookie|signature|sig|"
    r"(access|account|auth|hf|hub|private|secret|wandb)[_-]?(token|key)|(?<!eos_)(?<!bos_)(?<!pad_)(?<!stop_)(?<!end_)token"
)
_KEY = re.compile(rf"(^|[_.\s-])({_WORDS})$|(^|\.)key$", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY = re.compile(r"(?<=[?&;#])(?P<key>[\w.%-]+)=(?P<value>[^&#;\s\"'<>]+)")
_HEADER = re.compile(
    r"(?P<key>\b(?:x-[\w-]*(?:key|token|secret|auth)|(?:proxy-)?authorization|(?:set-)?cookie)\b[\"']?\s*[:=]\s*[\"']?)"
    r"(?P<value>[^\s\"'*][^\r\n\"']*)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(?P<key>\b(?:bearer|basic)\s+)(?P<value>[\w.~+/=-]{8,})", re.IGNORECASE)
_MIN_CHARS = 4
"""Shorter values are redacted in place, but not searched for in other texts, in which they would match anywhere."""
_MIN_CHARS_OF_ENVIRONMENT = 8
_known: dict[str, None] = {}
"""Values of this process's secrets, in all forms in which they may be written."""


def learn(value: Any, key: str = "") -> None:
    """Remember every secret in a run file, or in its part under `key`."""
    for secret in _secrets(value, key):
        learn_secret(secret)


def learn_secret(secret: str) -> None:
    """Remember a secret."""
    if len(secret) < _MIN_CHARS or secret == HIDDEN:
        return
    plain = {secret, unquote(secret)}
    forms = {form for each in plain for form in (each, quote(each, safe=""), quote(each), repr(each)[1:-1])}
    forms |= {json.dumps(each, ensure_ascii=ascii_only)[1:-1] for each in plain for ascii_only in (True, False)}
    for form in sorted(forms, key=len, reverse=True):
        _known[form] = None


def learn_environment() -> None:
    """Remember the values of environment variables with secret-like names, except paths (PWD)."""
    for name, value in os.environ.items():
        if names_secret(name) and len(value) >= _MIN_CHARS_OF_ENVIRONMENT and not os.path.isabs(value):
            learn_secret(value)


def names_secret(key: str) -> bool:
    """Whether the value of a key is a secret.

    Example:
        >>> names_secret("server.api_key"), names_secret("max_new_tokens"), names_secret("eos_token")
        (True, False, False)
    """
    return bool(_KEY.search(key))


def _secrets(value: Any, key: str) -> Iterator[str]:
    """Yield every secret in a value and its parts. `key` is the nearest key that may name a secret."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _secrets(part, key if names_secret(key) else str(name))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _secrets(part, key)
    elif names_secret(key):
        if value is not None and not isinstance(value, bool):
            yield str(value)
    elif isinstance(value, str):
        if key.endswith("_env"):
            yield os.environ.get(value, "")
        for match in _USERINFO.finditer(value):
            yield from (part for part in match[0][:-1].split(":", 1)[-1:] if part)
        for pattern in (_QUERY, _HEADER, _BEARER):
            yield from (each["value"] for each in pattern.finditer(value) if pattern is not _QUERY or _is_query(each))


def redact_command(command: Sequence[str]) -> list[str]:
    """Return the command without the values of secret keys, `--api-key VALUE` or `KEY=VALUE`, and known secrets."""
    shown: list[str] = []
    for previous, word in zip(["", *command], command, strict=False):
        key, equals, _ = word.partition("=")
        follows_key = previous.startswith("-") and "=" not in previous and names_secret(previous)
        redacted = f"{key}={HIDDEN}" if equals and names_secret(key) else redact_text(word)
        shown.append(HIDDEN if follows_key else redacted)
    return shown


def redact_mapping(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a run file without its secrets, for writing and display.

    Args:
        config: nested mappings and lists.

    Example:
        >>> redact_mapping({"judge": {"model": "m", "api_key": "sk-1"}})
        {'judge': {'model': 'm', 'api_key': '***'}}
    """
    return {key: _redact(value, str(key)) for key, value in config.items()}


def _redact(value: Any, key: str) -> Any:
    if names_secret(key) and value is not None and not isinstance(value, bool):
        return HIDDEN
    if isinstance(value, Mapping):
        return redact_mapping(value)
    if isinstance(value, list | tuple):
        return [_redact(entry, "") for entry in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Return the text without known secrets, credentials and secret queries in URLs, and secret headers.

    Args:
        text: any text.

    Example:
        >>> redact_text("GET https://me:pass@host/v1?token=abc&page=2")
        'GET https://***@host/v1?token=***&page=2'
    """
    for secret in _known:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    if "://" in text:
        text = _USERINFO.sub(f"{HIDDEN}@", text)
    text = _QUERY.sub(lambda each: f"{each['key']}={HIDDEN}" if _is_query(each) else each[0], text)
    for pattern in (_HEADER, _BEARER):
        text = pattern.sub(lambda each: each["key"] + HIDDEN, text)
    return text


def hidden_parts(value: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted places in a written run file from which a secret was removed."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from hidden_parts(part, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from hidden_parts(part, f"{path}.{index}".lstrip("."))
    elif isinstance(value, str) and (value == HIDDEN or f"://{HIDDEN}@" in value or f"={HIDDEN}" in value):
        yield path


def _is_query(match: re.Match[str]) -> bool:
    return names_secret(match["key"])


_HOSTILE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: control and format characters (which can reverse text), surrogates, separators."""
_KEPT = frozenset("\n\t\u200c\u200d")
"""Newlines, tabs, and the two joiners that scripts and emoji need."""


def printable(text: str) -> str:
    """Return `text` with terminal control characters as Python escapes, for example \\x1b for ESC.

    Args:
        text: any text, with several lines if needed.

    Example:
        >>> print(printable("red: " + chr(27) + "[31m"))
        red: \\x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(repr(char)[1:-1] if is_hostile(char) else char for char in text)


def is_hostile(char: str) -> bool:
    """Whether a terminal would act on a character instead of showing it."""
    return char not in _KEPT and unicodedata.category(char) in _HOSTILE


class PrintableFormatter(logging.Formatter):
    """A log formatter whose lines, tracebacks included, are printable and without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(redact_text(super().format(record)))
