"""Python functions as tools: describes them to a model and checks the arguments of its calls.

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
"""Maximum number of problems reported for one call."""
_HIDDEN_KEYS = ("title", "additionalProperties")
"""Keys of a schema that are not shown to the model."""


class ToolFunction:
    """A function or bound method that a model may call.

    Its docstring describes it to the model. An `Args:` section may describe the arguments. Each parameter needs a type.

    Example:
        >>> def add(a: int, b: int) -> int:
        ...     "Add two numbers."
        ...     return a + b
        >>> tool = ToolFunction(add)
        >>> tool.bind(ToolCall(name="add", arguments={"a": 1, "b": 2}))
        {'a': 1, 'b': 2}
        >>> tool.bind(ToolCall(name="add", arguments={"a": 1}))
        'add was not called: argument "b" is missing. Its arguments: a, b.'
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Read the function's signature and docstring.

        Args:
            function: Function with a docstring and typed parameters that can be passed by name.

        Raises:
            PluginError: The docstring or a type is missing, or a JSON schema cannot describe the types.
        """
        self.function = function
        self.name: str = getattr(function, "__name__", type(function).__name__)
        where = f'tool "{getattr(function, "__qualname__", self.name)}"'
        doc = inspect.getdoc(function)
        if not doc:
            raise PluginError("its docstring is missing", where=where, hint="describe it to the model in one")
        description, arguments = _split_docstring(doc)
        self._parameters = _parameters(function, where)
        try:
            self._model = _arguments_model(self._parameters, arguments)
            parameters = _schema(self._model)
        except (PydanticUserError, NameError, TypeError) as error:
            raise PluginError(f"its types cannot be described by a schema: {error}", where=where) from error
        function_schema = {"name": self.name, "description": description, "parameters": parameters}
        self.schema: Tool = {"type": "function", "function": function_schema}
        """Description of the tool for the chat template or a system message."""

    def bind(self, call: ToolCall) -> dict[str, Any] | str:
        """Return the call's arguments converted to the parameters' types, or an error message for the model.

        As strict as JSON allows: the text "5" is not an integer, but 5 can be a float, a list can be a tuple, and text
        can be a date.
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
        lines = [_describe(problem["type"], problem["loc"], problem["msg"]) for problem in problems[:_MAX_PROBLEMS]]
        if len(problems) > _MAX_PROBLEMS:
            lines.append(f"and {len(problems) - _MAX_PROBLEMS} more")
        names = [
            name if default is inspect.Parameter.empty else f"{name} (optional)"
            for name, (_, default) in self._parameters.items()
        ]
        return f"{self.name} was not called: {'; '.join(lines)}. Its arguments: {', '.join(names) or 'none'}."


def _describe(kind: str, place: tuple[int | str, ...], message: str) -> str:
    name = ".".join(str(part) for part in place)
    if kind == "missing":
        return f'argument "{name:.80}" is missing'
    if kind == "extra_forbidden":
        return f'there is no argument "{name:.80}"'
    return f'argument "{name:.80}": {message:.200}' if name else f"{message:.200}"


def _parameters(function: Callable[..., Any], where: str) -> dict[str, tuple[Any, Any]]:
    """Return the type and default of each parameter, with `inspect.Parameter.empty` for no default."""
    try:
        signature = inspect.signature(function).parameters
        types = {name: each.annotation for name, each in signature.items() if each.annotation is not each.empty}
        names = getattr(inspect.unwrap(function), "__globals__", {})
        # Without the return type, whose names may only be imported for type checkers.
        hints = typing.get_type_hints(SimpleNamespace(__annotations__=types), globalns=names, include_extras=True)
    except Exception as error:  # third-party annotations may raise anything
        raise PluginError(f"its signature cannot be read: {error}", where=where) from error
    for name, each in signature.items():
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise PluginError(f'its parameter "{each}" cannot be passed by name', where=where, hint="name each one")
        if name not in hints:
            raise PluginError(
                f'its parameter "{name}" is not annotated', where=where, hint=f"write its type, as in `{name}: int`"
            )
    return {name: (hints[name], each.default) for name, each in signature.items()}


def _arguments_model(parameters: dict[str, tuple[Any, Any]], descriptions: dict[str, str]) -> type[BaseModel]:
    """Create a model of the arguments. Fields are named a0, a1, … with parameter names as aliases, which may be any."""
    fields: dict[str, Any] = {}
    for place, (name, (hint, default)) in enumerate(parameters.items()):
        options: dict[str, Any] = {"alias": name, "description": descriptions.get(name)}
        if default is not inspect.Parameter.empty:
            options["default_factory"] = lambda: None  # never used: the function applies its own default
            if isinstance(default, str | int | float | bool):
                options["json_schema_extra"] = {"default": default}
        fields[f"a{place}"] = (hint, Field(**options))
    return create_model("Arguments", __config__=ConfigDict(extra="forbid", strict=True), **fields)


class _UntitledSchema(GenerateJsonSchema):
    """Omits the title of each field, which only repeats its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(schema_generator=_UntitledSchema)
    shown = {key: value for key, value in schema.items() if key not in _HIDDEN_KEYS}
    return shown | {"properties": shown.get("properties", {})}


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
