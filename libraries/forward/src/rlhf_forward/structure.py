"""The request option `structure`: the form of an answer, as a JSON schema, a regular expression or a grammar.

Loads without torch. `grammar.py` turns a structure into the tokens that may come next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.columns import Column
from rlhf_core.errors import DataError

STRUCTURE = "structure"
"""Request option, and column of each token: its place in a structured answer from 1 on, 0 if it is free."""
STRUCTURE_TEXT = "structure_text"
"""Column of each token: a part of the bytes that describe the structure of its answer. The parts are of equal size."""
STRUCTURE_COLUMNS: Mapping[str, Column] = {
    STRUCTURE: Column(dtype="int32", optional=True),
    STRUCTURE_TEXT: Column(dtype="uint8", optional=True),
}
"""Columns from which `policy_forward` computes the allowed tokens again: the place of each token in a structured
answer, from 1 on (0 is free), and [A, K] bytes of the structure, spread over the tokens of the answer."""
SCHEMA = "json_schema"
KINDS = (SCHEMA, "regex", "lark")
MAX_TEXT_BYTES = 32_768
"""Maximum size of a schema, an expression or a grammar."""
_HINT = 'use {"json_schema": {…}}, {"regex": "…"} or {"lark": "…"}'
_SUFFIXES = {".json": SCHEMA, ".regex": "regex", ".lark": "lark"}


@dataclass(frozen=True, slots=True)
class Structure:
    """The form of an answer."""

    kind: str
    """`json_schema`, `regex` or `lark`."""
    text: str
    """The schema as JSON, the expression, or the grammar."""

    @classmethod
    def of(cls, option: object, *, where: str) -> Structure | None:
        """Return the structure of a request option, or None if it is not set.

        Args:
            option: A mapping of a kind to its content, or None. A schema is an object, others are texts.
            where: Location for the error.

        Returns:
            The structure. Whether its content is valid shows only when it is compiled.

        Raises:
            DataError: The option has another form, or is too large.

        Example:
            >>> Structure.of({"regex": "yes|no"}, where="example")
            Structure(kind='regex', text='yes|no')
        """
        if option is None:
            return None
        if not isinstance(option, Mapping) or len(option) != 1 or next(iter(option)) not in KINDS:
            raise DataError(f"the option {STRUCTURE} is {option!r:.100}", where=where, hint=_HINT)
        ((kind, content),) = option.items()
        if kind == SCHEMA and isinstance(content, Mapping | bool):
            try:
                text = json.dumps(content, separators=(",", ":"), allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise DataError(f"the schema is not JSON: {error}", where=where, hint=_HINT) from error
        elif kind != SCHEMA and isinstance(content, str) and content:
            text = content
        else:
            problem = f"the {kind} of the option {STRUCTURE} is {content!r:.100}"
            raise DataError(problem, where=where, hint=_HINT)
        if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
            problem = f"the {kind} of the option {STRUCTURE} has more than {MAX_TEXT_BYTES} bytes"
            raise DataError(problem, where=where, hint="use a smaller one")
        return cls(kind, text)


def structure_of(options: Mapping[str, Any], *, where: str) -> Structure | None:
    """Return the structure of a request's options, or None if they do not set it.

    Args:
        options: Options of a request.
        where: Location for the error.

    Raises:
        DataError: The option is not a structure.
    """
    return Structure.of(options.get(STRUCTURE), where=where)


def read_structure(option: object) -> dict[str, Any] | None:
    """Return the value of `engine.structure` with the content of its file in place of the file's name.

    Args:
        option: A structure, `{"file": PATH}`, or None. The file's suffix is .json (a JSON schema), .regex or .lark.

    Raises:
        ValueError: The value is not a structure, or the file cannot be read.
    """
    if isinstance(option, Mapping) and set(option) == {"file"}:
        option = _read_file(Path(str(option["file"])))
    try:
        Structure.of(option, where="")
    except DataError as error:
        raise ValueError(f"{error.message}: {error.hint}") from error
    return None if option is None else dict(option)  # type: ignore[call-overload]


def _read_file(path: Path) -> dict[str, Any]:
    """Read a structure from a file. Raises `ValueError`."""
    if (kind := _SUFFIXES.get(path.suffix)) is None:
        raise ValueError(f"the name of the file {path} should end in {', '.join(_SUFFIXES)}")
    try:
        with path.open("rb") as file:
            text = file.read(MAX_TEXT_BYTES + 1).decode()
        return {kind: json.loads(text) if kind == SCHEMA else text.removesuffix("\n")}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"the file {path} cannot be read: {error}") from error
