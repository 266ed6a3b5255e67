"""An MCP server's tools as a model is told of them, and what they answer as text."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import create
from mcp.types import CallToolResult, EmbeddedResource, TextContent, TextResourceContents
from mcp.types import Tool as ServerTool

from rlhf_core.errors import ConfigError, EpisodeError
from rlhf_core.util import printable
from rlhf_episodes import Tool

MAX_NAME_CHARS = 128
MAX_TOOLS_CHARS = 100_000
"""Limit on all descriptions and schemas together, as JSON."""


def schemas(tools: Sequence[ServerTool], wanted: Sequence[str] | None, hidden: Sequence[str]) -> list[Tool]:
    """The tools in OpenAI's form: those that are `wanted` (None: all), in the server's order, without the `hidden`.

    Raises `ConfigError` for one that is not there, `EpisodeError` for a list that no model can be given.
    """
    offered = {tool.name: tool for tool in tools}
    if len(offered) < len(tools):
        raise _unusable("lists two tools of one name")
    for name in (*(wanted or ()), *hidden):
        if name not in offered:
            listed = printable(", ".join(offered))
            raise ConfigError(
                f'the server has no tool "{name}"', where="environment", hint=f"its tools: {listed:.1000}"
            )
    names = [name for name in offered if name not in hidden and (wanted is None or name in wanted)]
    found = [_schema(offered[name]) for name in names]
    if not found:
        raise _unusable("offers the policy no tool")
    if sum(len(json.dumps(each)) for each in found) > MAX_TOOLS_CHARS:
        raise _unusable(f"describes its tools in more than {MAX_TOOLS_CHARS} characters")
    return found


def _schema(tool: ServerTool) -> Tool:
    if not (0 < len(tool.name) <= MAX_NAME_CHARS and tool.name.isprintable() and not any(map(str.isspace, tool.name))):
        raise _unusable(f"has a tool of the name {tool.name[:MAX_NAME_CHARS]!r}")
    parameters = {"properties": {}, **_clean(tool.input_schema)}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": _clean(tool.description or ""), "parameters": parameters},
    }


def _unusable(what: str) -> EpisodeError:
    return EpisodeError(
        f"the MCP server {what}", where="environment.command", hint="environment.tools names those that are wanted"
    )


def _clean(value: Any) -> Any:
    """Without control and format characters and halves of pairs, which no description needs."""
    if isinstance(value, str):
        return "".join(char for char in value if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs"))
    if isinstance(value, dict):
        return {_clean(key): _clean(part) for key, part in value.items()}
    return [_clean(part) for part in value] if isinstance(value, list) else value


_QUICK = ("type", "enum", "required", "properties", "items", "anyOf")
"""Keywords that are checked: no pattern that a model could answer with a text that takes minutes, and no reference."""
_Validator = create(
    {},
    {keyword: Draft202012Validator.VALIDATORS[keyword] for keyword in _QUICK},
    type_checker=Draft202012Validator.TYPE_CHECKER,
)


def takes(tool: ServerTool, arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments fit the tool's schema, as far as that is quickly found; True if it cannot be applied."""
    try:
        return bool(_Validator(tool.input_schema).is_valid(dict(arguments)))
    except Exception:  # servers may give any schema
        return True


def text_of(result: CallToolResult, longest: int) -> str:
    """A tool's answer, cut after `longest` characters; content that is no text is named in brackets."""
    parts = [_part(part) for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    if len(text) > longest:
        text = f"{text[:longest]}\n[{len(text) - longest} characters left out]"
    return f"error: {text}" if result.is_error else text


def _part(part: Any) -> str:
    if isinstance(part, TextContent):
        return str(part.text)
    if isinstance(part, EmbeddedResource) and isinstance(part.resource, TextResourceContents):
        return str(part.resource.text)
    return f"[{part.type}]"
