"""A JSON Lines file, indexed by byte offsets: the records stay on disk."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..components import TaskContext
from ..errors import DataError
from ..protocols import PromptSource
from .plugin import JsonlConfig

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Escapes of surrogates, most of which form pairs for one character."""


class _NoNumber(ValueError):
    """NaN or an infinity, which Python writes and JSON does not have."""


def _refuse(constant: str) -> None:
    raise _NoNumber(constant)


_DECODER = json.JSONDecoder(parse_constant=_refuse)


class JsonlSource:
    """Every line of a file is a record, parsed when it is read.

    Raises `DataError` with file and line: no such file, an empty one; and, of a line that is read, that it is empty,
    not UTF-8, not JSON, or not an object.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_file():
            what = "is a folder, not a JSON Lines file" if path.is_dir() else "there is no such file"
            raise DataError(what, where=str(path), hint="paths start at the current folder")
        self._offsets, self._digest = _index(path)
        if not self._offsets:
            raise DataError("the file is empty", where=str(path), hint='write lines such as {"prompt": "1+1="}')

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        # Reopened each time: no descriptor to share between threads, copy to another process, or close.
        with self._path.open("rb") as file:
            file.seek(self._offsets[index])
            return parse_line(file.readline(), self._path, index + 1)

    def describe(self, index: int) -> str:
        return f"{self._path}:{index + 1}"

    def scan(self) -> Iterator[Mapping[str, Any] | DataError]:
        """Every record, or what is wrong with its line."""
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield parse_line(line, self._path, number)
                except DataError as error:
                    yield error

    def digest(self) -> str:
        """SHA-256 of the file."""
        return self._digest


def _index(path: Path) -> tuple[array[int], str]:
    """Where each line begins, and the SHA-256 of the file, in one reading."""
    starts, digest, size = array("Q"), sha256(), 0
    with path.open("rb") as file:
        for line in file:
            starts.append(size)
            digest.update(line)
            size += len(line)
    return starts, digest.hexdigest()


def parse_line(line: bytes, path: Path, number: int) -> Mapping[str, Any]:
    """The object in a line. Raises `DataError` naming file and line."""
    where = f"{path}:{number}"
    try:
        # Some editors write a byte-order mark before the first line.
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"the line is not UTF-8 (byte {error.start})", where=where) from None
    if not text:
        raise DataError("the line is empty", where=where, hint="every line is one JSON object; delete empty ones")
    try:
        record = _DECODER.decode(text)
        if "\\u" in text and _HALF.search(text):
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DataError("the line holds half of a character (a lone surrogate)", where=where) from None
    except (ValueError, RecursionError) as error:
        what = "nested too deep"
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg} at column {error.colno}"
        elif isinstance(error, _NoNumber):
            what = f"{error} is no number; write null"
        elif isinstance(error, ValueError):
            what = "a number of too many digits"
        raise DataError(f"the line is not JSON: {what}", where=where) from None
    if not isinstance(record, dict):
        raise DataError(f"the line is a JSON {type(record).__name__}, not an object", where=where)
    return record


def build(config: JsonlConfig, context: TaskContext) -> PromptSource:
    """The source of a `prompts` section."""
    return JsonlSource(context.base_folder / Path(config.path).expanduser())
