"""Problems of a run file, gathered and shown together, each with its place in the file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from .did_you_mean import suggestion
from .errors import ConfigError, RlhfError

ModelT = TypeVar("ModelT", bound=BaseModel)

_UNCALLED = "default_factory_not_called"
"""pydantic's echo of another error in the same section."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    path: str
    """Dotted place in the run file."""
    message: str

    def render(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class Problems:
    """Collects problems, so that a user sees all of them at once."""

    def __init__(self) -> None:
        self._found: list[Problem] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, path: str, message: str) -> None:
        self._found.append(Problem(path, message))

    def add_error(self, path: str, error: RlhfError) -> None:
        """An error raised elsewhere, put at its place in the file."""
        self._found.append(Problem(path, error.render().replace("\n  -> ", "; try: ")))

    def validate(
        self, model: type[ModelT], data: Mapping[str, Any], path: str = "", also_known: Sequence[str] = ()
    ) -> ModelT | None:
        """`data` as an instance of `model`, strictly; None, and problems noted, where it is not.

        `also_known` are keys that someone else read from the same place: for the suggestions.
        """
        try:
            return model.model_validate_json(json.dumps(data), strict=True, extra="forbid")
        except ValidationError as error:
            details = [each for each in error.errors(include_url=False) if each["type"] != _UNCALLED]
        messages: dict[str, list[str]] = {}
        for detail in details:
            place = _place(detail["loc"], data, keep_last=detail["type"] == "missing")
            dotted = ".".join(part for part in (path, *map(str, place)) if part)
            messages.setdefault(dotted, []).append(_message(model, detail, also_known))
        for dotted, texts in messages.items():
            self.add(dotted, " or ".join(dict.fromkeys(texts)) + _given(dotted, path, data))
        return None

    def raise_if_any(self, where: str) -> None:
        """Raise one `ConfigError` that lists every problem."""
        if not self._found:
            return
        if len(self._found) == 1:
            message = self._found[0].render()
        else:
            lines = "".join(f"\n  - {problem.render()}" for problem in self._found)
            message = f"{len(self._found)} problems{lines}"
        raise ConfigError(message, where=where, hint="`rlhf config schema` lists every option with its bounds")


def _place(loc: Sequence[int | str], data: Any, *, keep_last: bool) -> list[int | str]:
    """The part of pydantic's `loc` that stands in the file: it also names the members of unions."""
    place: list[int | str] = []
    for part in loc:
        if (isinstance(data, Mapping) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        ):
            data = data[part]
        elif keep_last and part == loc[-1]:
            pass
        else:
            break
        place.append(part)
    return place


def _given(dotted: str, path: str, data: Any) -> str:
    """` (given 3)` for a value that can be shown on a line."""
    inside = dotted.removeprefix(path).lstrip(".")
    for part in filter(None, inside.split(".")):
        if isinstance(data, Mapping) and part in data:
            data = data[part]
        elif isinstance(data, list) and part.isdigit() and int(part) < len(data):
            data = data[int(part)]
        else:
            return ""
    if isinstance(data, Mapping):
        return ""
    shown = json.dumps(data, ensure_ascii=False)
    return f" (given {shown if len(shown) <= 60 else shown[:57] + '...'})"


def _message(model: type[BaseModel], detail: Any, also_known: Sequence[str]) -> str:
    kind, loc = detail["type"], detail["loc"]
    if kind == "extra_forbidden":
        known = [*(also_known if len(loc) == 1 else ()), *_fields_at(model, loc[:-1])]
        listed = f" (known: {', '.join(known)})" if known else ""
        return f"unknown key{suggestion(str(loc[-1]), known)}{listed}"
    if kind == "missing":
        return "is required"
    text = str(detail["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return text.replace("Input should be", "should be", 1)


def _fields_at(model: type[BaseModel], loc: Sequence[int | str]) -> list[str]:
    """Names of the keys known at a place inside `model`."""
    here: list[type[BaseModel]] = [model]
    for part in loc:
        if isinstance(part, int):
            continue
        fields = [each.model_fields[part] for each in here if part in each.model_fields]
        if fields:
            here = [found for each in fields for found in _models_in(each.annotation)]
    return [field.alias or name for each in here for name, field in each.model_fields.items()]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) in (Union, UnionType, list, tuple, dict, Annotated):
        return [found for each in get_args(annotation) for found in _models_in(each)]
    is_model = get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return [annotation] if is_model else []
