"""Problems of a run file, collected and reported together, each with its place in the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError, RlhfError
from ..plugins.functions import UnreadOptions
from ..plugins.names import KNOWN
from ..util.did_you_mean import suggestion
from ..util.redact import names_secret, redact_text
from .load import apply_override

ModelT = TypeVar("ModelT", bound=BaseModel)

_UNCALLED = "default_factory_not_called"
"""pydantic error type that only repeats another error of the same section."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a run file.

    Example:
        >>> Problem("train.episodes", "should be at least 1").render()
        'train.episodes: should be at least 1'
    """

    path: str
    """Dotted place in the run file. From `Section.check`: relative to the section."""
    message: str
    hint: str | None = None
    """None: point to the schema. Empty: no hint."""

    def render(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class Problems:
    """Collects problems, so that the user sees all of them at once."""

    def __init__(self, overrides: Mapping[str, str] | None = None) -> None:
        """`overrides`: key -> value as typed, for the options that `--set` changed."""
        self._found: list[Problem] = []
        self._overrides = overrides or {}
        self.removed: list[str] = []
        """Dotted names of options in the run file that only earlier versions have (`Section.removed`)."""

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._found)

    def add(self, path: str, message: str, hint: str | None = None) -> None:
        """Add a problem, unless it was added already."""
        problem = Problem(path, message, hint)
        if problem not in self._found:
            self._found.append(problem)

    def add_error(self, path: str, error: RlhfError) -> None:
        """Add an error raised elsewhere as a problem at `path`, with its own hint or none."""
        message = f"{error.where}: {error.message}" if error.where else error.message
        self.add(path, message, error.hint or "")

    def validate(
        self,
        model: type[ModelT],
        data: Mapping[str, Any],
        path: str = "",
        also_known: Sequence[str] = (),
        context: Any = None,
    ) -> ModelT | None:
        """Validate `data` strictly as `model`. Add problems and return None if it is invalid.

        A text option accepts any scalar of `--set` as it was typed.

        Args:
            model: the class to return.
            data: JSON values.
            path: dotted place of `data` in the run file.
            also_known: further valid keys at this place, for suggestions.
            context: passed to the validators, whose errors may carry a `hint` in their own context.
        """
        try:
            extra: Literal["allow", "forbid"] = "allow" if issubclass(model, UnreadOptions) else "forbid"
            return model.model_validate_json(json.dumps(data), strict=True, extra=extra, context=context)
        except ValidationError as error:
            details = [each for each in error.errors(include_url=False) if each["type"] != _UNCALLED]
        if (retyped := self._retyped(details, data, path)) is not None:
            return self.validate(model, retyped, path, also_known, context)
        messages: dict[str, list[str]] = {}
        shown_values: dict[str, str] = {}
        hints = {place: f"pip install {home}" for place, home in KNOWN["sections"].items()}  # those not installed
        for detail in details:
            place = _place(detail, data)
            dotted = ".".join(part for part in (path, *map(str, place)) if part)
            if (replacement := _replacement(model, detail)) is not None:
                self.removed.append(dotted)
            message = _message(model, detail, also_known) if replacement is None else f"was removed: {replacement}"
            messages.setdefault(dotted, []).append(message)
            is_shown = detail["type"] != "extra_forbidden" and not names_secret(dotted)  # a key may be misspelled
            shown_values[dotted] = _shown_value(detail["input"]) if is_shown else ""
            if (hint := detail.get("ctx", {}).get("hint")) is not None:
                hints[dotted] = hint
        for dotted, texts in messages.items():
            self.add(dotted, " or ".join(dict.fromkeys(texts)) + shown_values[dotted], hints.get(dotted))
        return None

    def _retyped(self, details: Sequence[Any], data: Mapping[str, Any], path: str) -> dict[str, Any] | None:
        """Return `data` with the typed text for each number or boolean in a text option, None if nothing changes."""
        retyped = deepcopy(dict(data))
        for detail in details:
            dotted = ".".join(map(str, _place(detail, data)))
            typed = self._overrides.get(f"{path}.{dotted}".lstrip("."))
            wants_text = detail["type"] == "string_type" and isinstance(detail["input"], bool | int | float)
            if wants_text and typed is not None:
                apply_override(retyped, dotted, typed)
        return retyped if retyped != data else None

    def _source(self, path: str, where: str) -> str:
        """Return the source of a problem at `path`: the `--set` that caused it, or the run file `where`."""
        inside = [key for key in self._overrides if f"{path}.".startswith(f"{key}.")]
        below = [key for key in self._overrides if path and key.startswith(f"{path}.")]
        return f"--set {inside[-1]}" if inside else f"{where} with --set {below[-1]}" if below else where

    def raise_if_any(self, where: str) -> None:
        """Raise one `ConfigError` that lists every problem."""
        if not self._found:
            return
        hint = "`rlhf config schema` lists every option with its bounds"
        sources = [self._source(problem.path, where) for problem in self._found]
        if len(self._found) == 1:
            only, source = self._found[0], sources[0]
            message = only.message if source == f"--set {only.path}" else only.render()
            raise ConfigError(message, where=source, hint=hint if only.hint is None else only.hint)
        lines = [
            f"\n  - {problem.render()}"
            + (f" ({source.removeprefix(f'{where} ')})" if source != where else "")
            + (f"\n    -> {problem.hint}" if problem.hint else "")
            for problem, source in zip(self._found, sources, strict=True)
        ]
        raise ConfigError(f"{len(self._found)} problems{''.join(lines)}", where=where, hint=hint)


def _place(detail: Any, data: Any) -> list[int | str]:
    """Return the part of pydantic's `loc` that exists in the file. The rest names union members or a missing key."""
    place: list[int | str] = []
    for part in detail["loc"]:
        exists = part in data if isinstance(data, Mapping) else isinstance(data, list) and part in range(len(data))
        if not exists:
            return detail["loc"] if detail["type"] == "missing" else place
        place.append(part)
        data = data[part]
    return place


def _shown_value(value: Any) -> str:
    """Return ` (given 3)` for a value that fits on a line, or nothing."""
    if isinstance(value, Mapping):
        return ""
    text = redact_text(json.dumps(value, ensure_ascii=False))
    return f" (given {text if len(text) <= 60 else text[:57] + '...'})"


def _message(model: type[BaseModel], detail: Any, also_known: Sequence[str]) -> str:
    """Return the text on one error of pydantic."""
    kind, loc = detail["type"], detail["loc"]
    if kind == "extra_forbidden":
        known = list(dict.fromkeys([*(also_known if len(loc) == 1 else ()), *_fields_at(model, loc[:-1])]))
        listed = f" (known: {', '.join(known)})" if known else ""
        return f"unknown key{suggestion(str(loc[-1]), known)}{listed}"
    if kind == "missing":
        return "is required"
    text = str(detail["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return text.replace("Input should be", "should be", 1)


def _replacement(model: type[BaseModel], detail: Any) -> str | None:
    """Return the text on an unknown key that earlier versions had (`Section.removed`), else None."""
    if detail["type"] != "extra_forbidden":
        return None
    *place, key = detail["loc"]
    texts = (getattr(each, "removed", {}).get(key) for each in _models_at(model, place))
    return next((text for text in texts if text is not None), None)


def _fields_at(model: type[BaseModel], loc: Sequence[int | str]) -> list[str]:
    """Return the valid keys (field aliases or names) of the sections at the path `loc` in the schema `model`."""
    return [field.alias or name for each in _models_at(model, loc) for name, field in each.model_fields.items()]


def _models_at(model: type[BaseModel], loc: Sequence[int | str]) -> list[type[BaseModel]]:
    """Return the nested schemas at the path `loc` in the schema `model`. Several for a union. Indexes are ignored."""
    models: list[type[BaseModel]] = [model]
    for part in loc:
        if isinstance(part, int):
            continue
        fields = [each.model_fields[part] for each in models if part in each.model_fields]
        if fields:
            models = [inner for each in fields for inner in models_in(each.annotation)]
    return models


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that a type consists of."""
    if get_origin(annotation) in (Union, UnionType, list, tuple, dict, Annotated):
        return [inner for each in get_args(annotation) for inner in models_in(each)]
    is_model = get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return [annotation] if is_model else []
