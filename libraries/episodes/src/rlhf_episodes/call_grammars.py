"""Lark grammars of replies that have to call tools, and of replies in a format that may call tools instead."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from .contract import Tool
from .tool_calls import MAX_CALLS, ToolFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANY_OBJECT: Mapping[str, object] = {"type": "object"}


def calls_grammar(
    tool_format: ToolFormat,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Tool],
    *,
    several: bool,
    answer: Mapping[str, object] | None = None,
) -> str | None:
    """Return the grammar of a reply that calls one of the tools, with arguments of the tool's schema.

    Args:
        tool_format: Format of the calls.
        tokenizer: The policy's tokenizer, some of whose special tokens may mark calls.
        tools: The tools that may be called, at least one.
        several: Whether the reply may contain several calls.
        answer: JSON schema of a reply that may take the place of calls. None: the reply has to call a tool.

    Returns:
        The grammar in llguidance's dialect of Lark, or None if calls in this format cannot be written as a grammar.
    """
    write = _STARTS.get(tool_format.name)
    if write is None:
        return None
    special = set(tokenizer.all_special_tokens)

    def literal(text: str) -> str:
        """Return a terminal of the text, which may be a special token."""
        return f"<[{tokenizer.convert_tokens_to_ids(text)}]>" if text in special else json.dumps(text)

    arguments = "parameters" if tool_format.name == "llama3" else "arguments"
    rules = [f"calls: {write(literal, several)}", f"body: {' | '.join(f'body{n}' for n in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        function = tool["function"]
        before = json.dumps(f'{{"name": {json.dumps(function["name"])}, "{arguments}": ')
        schema = function.get("parameters") or _ANY_OBJECT
        rules += [f'body{number}: {before} arguments{number} "}}"', f"arguments{number}: %json {json.dumps(schema)}"]
    if answer is not None:
        rules.append(f"answer: %json {json.dumps(answer)}")
    return "\n".join([f"start: {'calls' if answer is None else 'answer | calls'}", *rules, ""])


def _repeated(one: str, between: str, several: bool) -> str:
    return f"{one} ({between} {one}){{0,{MAX_CALLS - 1}}}" if several else one


Literal = Callable[[str], str]
_STARTS: Mapping[str, Callable[[Literal, bool], str]] = {
    "hermes": lambda literal, several: _repeated(
        f'{literal("<tool_call>")} "\\n" body "\\n" {literal("</tool_call>")}', '"\\n"', several
    ),
    "mistral": lambda literal, several: " ".join(
        [literal("[TOOL_CALLS]"), '"["', _repeated("body", '", "', several), '"]"']
    ),
    "llama3": lambda literal, several: _repeated("body", '"; "', several),
}
"""Grammar of calls by the name of their format, after the name of the rule."""


def names_of(tools: Iterable[Tool]) -> list[str]:
    """Return the names of tools."""
    return [str(tool["function"]["name"]) for tool in tools]
