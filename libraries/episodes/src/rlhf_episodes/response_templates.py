"""Response templates of transformers for model families whose tokenizers do not include one.

A family is recognized by the call that its chat template renders (`ChatTemplate.call_format`), not by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The reply format of a model family."""

    name: str
    tag: str
    """Text in every reply with a call, or "" if unknown."""
    end: str | None
    """End of what `tag` opens. A call without it was cut. None if cut arguments are detected by their syntax."""
    template: Mapping[str, Any]
    in_channels: bool = False
    """Whether special tokens separate the parts of a reply, so that its text alone would mix them."""
    content_precedes_calls: bool = True
    """Whether chat templates write a reply's content before its calls. If not, calls replace the content."""


_FUNCTION = {"name": "{name}", "arguments": "{content}"}
_CALL = {"repeats": True, "transform": {"type": "function", "function": _FUNCTION}}


def _template(end: str, calls: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Return a template whose calls start with the name. The rest of the reply is its content."""
    fields = {"tool_calls": {**_CALL, **calls}, "content": {"close_pattern": end, "content": "text"}, **others}
    # An anchor is required, but only used to read the end of a prompt.
    return {"defaults": {"role": "assistant"}, "start_anchor": "assistant", "fields": fields}


def _part(begin: str, end: str, content: str = "text", **others: Any) -> dict[str, Any]:
    """Return a field of a template: the part of a reply between two patterns."""
    return {"open_pattern": begin, "close_pattern": end, "content": content, **others}


def _xml(begin: str, argument: str) -> dict[str, Any]:
    """Return the field of calls whose arguments are written in tags."""
    text = {"name": "text", "args": {"strip": False}}
    return _part(begin, r"</tool_call>\s*", "xml-inline", content_args={"tag_pattern": argument, "value_parser": text})


_START, _TO_MESSAGE = r"(?:<\|start\|>assistant)?", r"(?:[^<]|<\|constrain\|>){0,64}<\|message\|>"
_IM_END = r"<\|im_end\|>\s*"
FAMILIES = (
    Family(
        name="gpt-oss",
        tag=" to=functions.",
        end=None,
        in_channels=True,
        template=_template(
            r"<\|return\|>\s*",
            # Templates write the recipient before the channel, but models often write it after the channel.
            _part(
                _START
                + r"(?:<\|channel\|>commentary)? to=functions\.(?P<name>[^\s<]+)(?:<\|channel\|>commentary)?"
                + _TO_MESSAGE,
                r"<\|call\|>\s*",
                "json",
            ),
            content=_part(_START + r"<\|channel\|>final" + _TO_MESSAGE, r"<\|(?:return|end)\|>\s*"),
            thinking=_part(
                _START + r"<\|channel\|>(?:analysis|commentary)<\|message\|>", r"<\|end\|>\s*", repeats=True, join="\n"
            ),
        ),
    ),
    Family(
        name="qwen3_5",  # and nemotron_3
        tag="<function=",
        end="</function>",
        template=_template(
            _IM_END,
            _xml(
                r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
                r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
            ),
        ),
    ),
    Family(
        name="glm4moe",
        tag="<tool_call>",
        end="</tool_call>",
        template=_template(
            r"<\|(?:user|observation)\|>\s*",
            _xml(
                r"<tool_call>(?P<name>[^\s<]+)\s*",
                r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            ),
        ),
    ),
    Family(
        name="gemma4",
        tag="<|tool_call>",
        end="<tool_call|>",
        in_channels=True,
        content_precedes_calls=False,
        template=_template(
            r"(?:<turn\|>|<\|tool_response>|<eos>)\s*",
            _part(
                r"<\|tool_call>call:(?P<name>[^\s{]+)",
                r"<tool_call\|>\s*",
                "json",
                content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            ),
            reasoning_content=_part(r"<\|channel>thought", r"<channel\|>\s*"),
        ),
    ),
    Family(
        name="lfm2",
        tag="<|tool_call_start|>",
        end="<|tool_call_end|>",
        in_channels=True,
        template=_template(
            _IM_END,
            # The content is a list of Python calls, parsed by `response_parser.py`.
            _part(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", transform="{content}"),
        ),
    ),
)
"""All known families, in the order in which they are tried."""
