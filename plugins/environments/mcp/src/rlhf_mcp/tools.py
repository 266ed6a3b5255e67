"""Describes an MCP server's tools to a model and converts their results to text and images."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import create
from mcp.types import CallToolResult, EmbeddedResource, ImageContent, TextContent, TextResourceContents
from mcp.types import Tool as ServerTool

from rlhf_core.errors import ConfigError, EpisodeError
from rlhf_core.util import printable
from rlhf_episodes import Tool

MAX_NAME_CHARS = 128
MAX_TOOLS_CHARS = 100_000
"""Limit on all descriptions and schemas together, in characters of JSON."""


def schemas(tools: Sequence[ServerTool], wanted: Sequence[str] | None, hidden: Sequence[str]) -> list[Tool]:
    """Convert the server's tools to OpenAI's form, in the server's order.

    Args:
        tools: All tools of the server.
        wanted: Names of tools to include. None includes all.
        hidden: Names of tools to exclude.

    Raises:
        ConfigError: The server does not have a wanted or hidden tool.
        EpisodeError: The list is ambiguous, empty or too long for a prompt, or a name is invalid.
    """
    offered = {tool.name: tool for tool in tools}
    if len(offered) < len(tools):
        raise _unusable("lists two tools of the same name")
    for name in (*(wanted or ()), *hidden):
        if name not in offered:
            listed = printable(", ".join(offered))
            raise ConfigError(
                f'the server does not have a tool "{name}"', where="environment", hint=f"its tools: {listed:.1000}"
            )
    names = [name for name in offered if name not in hidden and (wanted is None or name in wanted)]
    converted = [_schema(offered[name]) for name in names]
    if not converted:
        raise _unusable("does not offer any tool to the policy")
    if sum(len(json.dumps(each)) for each in converted) > MAX_TOOLS_CHARS:
        raise _unusable(f"describes its tools in more than {MAX_TOOLS_CHARS} characters")
    return converted


def _schema(tool: ServerTool) -> Tool:
    if not (0 < len(tool.name) <= MAX_NAME_CHARS and tool.name.isprintable() and not any(map(str.isspace, tool.name))):
        raise _unusable(f"lists a tool with the invalid name {tool.name[:MAX_NAME_CHARS]!r}")
    parameters = {"properties": {}, **_clean(tool.input_schema)}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": _clean(tool.description or ""), "parameters": parameters},
    }


def _unusable(problem: str) -> EpisodeError:
    hint = "select tools with environment.tools"
    return EpisodeError(f"the MCP server {problem}", where="environment.command", hint=hint)


def _clean(value: Any) -> Any:
    """Remove control and format characters and lone surrogates from all texts in a value."""
    if isinstance(value, str):
        return "".join(char for char in value if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs"))
    if isinstance(value, dict):
        return {_clean(key): _clean(part) for key, part in value.items()}
    return [_clean(part) for part in value] if isinstance(value, list) else value


_QUICK = ("type", "enum", "required", "properties", "items", "anyOf")
"""Schema keywords to check. Patterns, which a model's text could make slow, and references are not checked."""
_Validator = create(
    {},
    {keyword: Draft202012Validator.VALIDATORS[keyword] for keyword in _QUICK},
    type_checker=Draft202012Validator.TYPE_CHECKER,
)


def fits_schema(tool: ServerTool, arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments match the tool's schema, as far as that is checked. True if the schema is invalid."""
    try:
        return bool(_Validator(tool.input_schema).is_valid(dict(arguments)))
    except Exception:  # servers may send any schema
        return True


def result_text(result: CallToolResult, max_chars: int) -> str:
    """Return a tool's result as text of at most `max_chars` characters. Other content is named in brackets."""
    parts = [_part(part) for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    if len(text) > max_chars:
        text = f"{text[:max_chars]}\n[{len(text) - max_chars} characters left out]"
    return f"error: {text}" if result.is_error else text


def result_content(result: CallToolResult, max_chars: int) -> str | list[Mapping[str, Any]]:
    """Return a tool's result as text (`result_text`) or, if it has images, as text and image parts.

    An image that cannot be used becomes a text with the reason, since servers may send anything.
    """
    if not any(isinstance(part, ImageContent) for part in result.content):
        return result_text(result, max_chars)
    parts: list[Mapping[str, Any]] = [{"type": "text", "text": "error: "}] if result.is_error else []
    for part in result.content:
        if isinstance(part, ImageContent):
            parts.append({"type": "image", "base64": part.data, "required": False})
        else:
            text = _part(part)
            parts.append({"type": "text", "text": text[:max_chars]})
            max_chars -= min(max_chars, len(text))
    return parts


def _part(part: Any) -> str:
    if isinstance(part, TextContent):
        return str(part.text)
    if isinstance(part, EmbeddedResource) and isinstance(part.resource, TextResourceContents):
        return str(part.resource.text)
    return f"[{part.type}]"
