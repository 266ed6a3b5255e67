"""Python functions as tools: their description for a model, and the arguments of its calls checked against their types.

Imports neither torch nor transformers, so that a worker that only runs tools starts fast.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from rlhf_core.errors import PluginError
from rlhf_core.types import ToolCall

from .contract import Tool

_MAX_PROBLEMS = 5
"""Told of one call."""
_NOT_SAID = ("title", "additionalProperties")
"""Parts of a schema of which a model is not told."""


class ToolFunction:
    """A function or bound method that a model may call.

    Its docstring says what it does; an `Args:` section may say what each argument is. Each parameter has a type.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Read signature and docstring. Raises `PluginError`, naming the function, where something is missing."""
        self.function = function
        self.name: str = getattr(function, "__name__", type(function).__name__)
        where = f'tool "{getattr(function, "__qualname__", self.name)}"'
        doc = inspect.getdoc(function)
        if not doc:
            raise PluginError("it has no docstring", where=where, hint="say in one what it does: the model reads it")
        description, arguments = _split_docstring(doc)
        self._parameters = _parameters(function, where)
        try:
            self._model = _arguments_model(self._parameters, arguments)
            parameters = _schema(self._model)
        except (PydanticUserError, NameError, TypeError) as error:
            raise PluginError(f"its types make no schema: {error}", where=where) from error
        function_schema = {"name": self.name, "description": description, "parameters": parameters}
        self.schema: Tool = {"type": "function", "function": function_schema}
        """For the chat template, or for a description in a system message."""

    def bind(self, call: ToolCall) -> dict[str, Any] | str:
        """The keyword arguments of a call, converted to the parameters' types; or what is wrong, for the model to read.

        As strict as JSON allows: "5" is no integer, but 5 is a float, a list may be a tuple, and text may be a date.
        """
        if call.error is not None:
            return call.error
        try:
            values = self._model.model_validate_json(json.dumps(dict(call.arguments)))
        except ValidationError as error:
            return self._explain(error)
        return {
            name: getattr(values, f"a{place}")
            for place, name in enumerate(self._parameters)
            if f"a{place}" in values.model_fields_set
        }

    def _explain(self, error: ValidationError) -> str:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        told = [_problem(problem["type"], problem["loc"], problem["msg"]) for problem in problems[:_MAX_PROBLEMS]]
        if len(problems) > _MAX_PROBLEMS:
            told.append(f"and {len(problems) - _MAX_PROBLEMS} more")
        takes = [
            name if default is inspect.Parameter.empty else f"{name} (optional)"
            for name, (_, default) in self._parameters.items()
        ]
        return f"{self.name} was not called: {'; '.join(told)}. Its arguments: {', '.join(takes) or 'none'}."


def _problem(kind: str, place: tuple[int | str, ...], message: str) -> str:
    name = ".".join(str(part) for part in place)
    if kind == "missing":
        return f'argument "{name:.80}" is missing'
    if kind == "extra_forbidden":
        return f'there is no argument "{name:.80}"'
    return f'argument "{name:.80}": {message:.200}' if name else f"{message:.200}"


def _parameters(function: Callable[..., Any], where: str) -> dict[str, tuple[Any, Any]]:
    """Type and default (`inspect.Parameter.empty` where there is none) of each parameter."""
    try:
        signature = inspect.signature(function).parameters
        written = {name: each.annotation for name, each in signature.items() if each.annotation is not each.empty}
        names = getattr(inspect.unwrap(function), "__globals__", {})
        # Of the parameters alone: what a return type names may be there for type checkers only.
        hints = typing.get_type_hints(SimpleNamespace(__annotations__=written), globalns=names, include_extras=True)
    except Exception as error:  # annotations of strangers may name anything
        raise PluginError(f"its signature cannot be read: {error}", where=where) from error
    for name, each in signature.items():
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise PluginError(f'its parameter "{each}" cannot be given by name', where=where, hint="name them all")
        if name not in hints:
            raise PluginError(
                f'its parameter "{name}" has no type', where=where, hint=f"write it as `{name}: int`, with its own type"
            )
    return {name: (hints[name], each.default) for name, each in signature.items()}


def _arguments_model(parameters: dict[str, tuple[Any, Any]], descriptions: dict[str, str]) -> type[BaseModel]:
    """Fields are a0, a1, …, so that a parameter may have any name; the parameters' names are their aliases."""
    fields: dict[str, Any] = {}
    for place, (name, (hint, default)) in enumerate(parameters.items()):
        options: dict[str, Any] = {"alias": name, "description": descriptions.get(name)}
        if default is not inspect.Parameter.empty:
            options["default_factory"] = lambda: None  # never read: the function has its own
            if isinstance(default, str | int | float | bool):
                options["json_schema_extra"] = {"default": default}
        fields[f"a{place}"] = (hint, Field(**options))
    return create_model("Arguments", __config__=ConfigDict(extra="forbid", strict=True), **fields)


class _Untitled(GenerateJsonSchema):
    """Without a title for each field, which only repeats its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(schema_generator=_Untitled)
    said = {key: value for key, value in schema.items() if key not in _NOT_SAID}
    return said | {"properties": said.get("properties", {})}


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


def _split_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its description and the descriptions in its `Args:` section, by argument."""
    lines = doc.splitlines()
    first = next((place for place, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    arguments: dict[str, str] = {}
    section, name, depth = "", "", 0
    for line in lines[first:]:
        indent = len(line) - len(line.lstrip())
        if found := _SECTION.match(line):
            section, name, depth = found[1], "", 0
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = depth or indent
            if indent == depth and (found := _ARGUMENT.match(line.strip())):
                name = found[1]
                arguments[name] = found[2]
            elif name:
                arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return "\n".join(lines[:first]).strip(), arguments
