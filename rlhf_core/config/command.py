"""An option that is a program to start, so that core can hold it against what a run may start (SECURITY.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args

from pydantic import BaseModel, Field, StringConstraints


class _IsCommand:
    """Marks the type of such an option."""


Command = Annotated[list[Annotated[str, StringConstraints(pattern=r"^[^\x00]+$")]], Field(min_length=1), _IsCommand()]
"""The type of an option that is a program and its arguments, to start without a shell. Core refuses a run that may not
start it, before anything is built."""


def commands_of(config: BaseModel) -> Iterator[tuple[str, list[str]]]:
    """Dotted key and value of each option that is a `Command`, or is made of them."""
    for name, field in type(config).model_fields.items():
        is_command = _names_command(field.metadata, field.annotation)
        yield from _in_value(name, getattr(config, name), is_command)


def _names_command(metadata: Any, annotation: Any) -> bool:
    if any(isinstance(each, _IsCommand) for each in metadata):
        return True
    return any(_names_command(getattr(part, "__metadata__", ()), part) for part in get_args(annotation))


def _in_value(path: str, value: Any, is_command: bool) -> Iterator[tuple[str, list[str]]]:
    if isinstance(value, BaseModel):
        yield from ((f"{path}.{key}", command) for key, command in commands_of(value))
    elif is_command and isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        yield path, value
    elif isinstance(value, list | Mapping):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _in_value(f"{path}.{key}", part, is_command)
