"""A prompt source over a JSON Lines file, indexed by byte offsets, with records on disk."""

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
"""Escape of a surrogate. Two of them form one character."""


class _NotANumber(ValueError):
    """NaN or an infinity, which Python writes but JSON does not allow."""


def _refuse(constant: str) -> None:
    raise _NotANumber(constant)


_DECODER = json.JSONDecoder(parse_constant=_refuse)


class JsonlSource:
    """A source in which every line of a file is a record, parsed when it is read.

    Raises `DataError` with file and line if the file is missing or empty, or if a line is empty, not UTF-8, not JSON,
    or not an object.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_file():
            problem = "is a folder, not a JSON Lines file" if path.is_dir() else "no such file"
            raise DataError(problem, where=str(path), hint="paths start at the current folder")
        self._offsets, self._digest = _index(path)
        if not self._offsets:
            raise DataError("the file is empty", where=str(path), hint='write lines such as {"prompt": "1+1="}')

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        # Reopened each time, so no descriptor is shared between threads, copied to another process, or left open.
        with self._path.open("rb") as file:
            file.seek(self._offsets[index])
            return parse_line(file.readline(), self._path, index + 1)

    def describe(self, index: int) -> str:
        """Return file and line of a record, for errors."""
        return f"{self._path}:{index + 1}"

    def scan(self) -> Iterator[Mapping[str, Any] | DataError]:
        """Yield every record, or the error of its line."""
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield parse_line(line, self._path, number)
                except DataError as error:
                    yield error

    def digest(self) -> str:
        """Return the hexadecimal SHA-256 of the file."""
        return self._digest


def _index(path: Path) -> tuple[array[int], str]:
    """Return the byte offset of each line, and the SHA-256 of the file, in one pass."""
    starts, digest, size = array("Q"), sha256(), 0
    with path.open("rb") as file:
        for line in file:
            starts.append(size)
            digest.update(line)
            size += len(line)
    return starts, digest.hexdigest()


def parse_line(line: bytes, path: Path, number: int) -> Mapping[str, Any]:
    """Parse the object in a line. Raises `DataError` with file and line.

    Example:
        >>> parse_line(b'{"prompt": "1+1="}', Path("train.jsonl"), 3)
        {'prompt': '1+1='}
    """
    where = f"{path}:{number}"
    try:
        # Some editors write a byte-order mark before the first line.
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"the line is not UTF-8 (byte {error.start})", where=where) from None
    if not text:
        raise DataError("the line is empty", where=where, hint="every line is one JSON object. Delete empty lines")
    try:
        record = _DECODER.decode(text)
        if "\\u" in text and _HALF.search(text):
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DataError("the line contains half of a character (a lone surrogate)", where=where) from None
    except (ValueError, RecursionError) as error:
        problem = "nested too deep"
        if isinstance(error, json.JSONDecodeError):
            problem = f"{error.msg} at column {error.colno}"
        elif isinstance(error, _NotANumber):
            problem = f"{error} is not a number, use null"
        elif isinstance(error, ValueError):
            problem = "a number with too many digits"
        raise DataError(f"the line is not JSON: {problem}", where=where) from None
    if not isinstance(record, dict):
        raise DataError(f"the line is a JSON {type(record).__name__}, not an object", where=where)
    return record


def build(config: JsonlConfig, context: TaskContext) -> PromptSource:
    """Build the source of a `prompts` section."""
    return JsonlSource(context.base_folder / Path(config.path).expanduser())
