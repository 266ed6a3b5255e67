"""Response templates of transformers for model families whose tokenizers have none.

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
    """Whether chat templates write a reply's content before its calls. If not, a reply with calls has no content."""


_FUNCTION = {"name": "{name}", "arguments": "{content}"}


def _template(end: str, calls: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Return a template whose calls start with the name. The rest of the reply is its content."""
    called = {"repeats": True, "transform": {"type": "function", "function": _FUNCTION}, **calls}
    content = {"close_pattern": end, "content": "text"}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "assistant",  # required, but only used to read the end of a prompt
        "fields": {"tool_calls": called, "content": content, **others},
    }


_TO_MESSAGE = r"(?:[^<]|<\|constrain\|>){0,64}<\|message\|>"
_IM_END = r"<\|im_end\|>\s*"
FAMILIES = (
    Family(
        name="gpt-oss",
        tag=" to=functions.",
        end=None,
        in_channels=True,
        template=_template(
            r"<\|return\|>\s*",
            {
                # Templates write the recipient before the channel, but models often write it after the channel.
                "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)?"
                r" to=functions\.(?P<name>[^\s<]+)(?:<\|channel\|>commentary)?" + _TO_MESSAGE,
                "close_pattern": r"<\|call\|>\s*",
                "content": "json",
            },
            content={
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>final" + _TO_MESSAGE,
                "close_pattern": r"<\|(?:return|end)\|>\s*",
                "content": "text",
            },
            thinking={
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:analysis|commentary)<\|message\|>",
                "close_pattern": r"<\|end\|>\s*",
                "content": "text",
                "repeats": True,
                "join": "\n",
            },
        ),
    ),
    Family(
        name="qwen3_5",  # and nemotron_3
        tag="<function=",
        end="</function>",
        template=_template(
            _IM_END,
            {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
                "close_pattern": r"</tool_call>\s*",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
                    "value_parser": {"name": "text", "args": {"strip": False}},
                },
            },
        ),
    ),
    Family(
        name="glm4moe",
        tag="<tool_call>",
        end="</tool_call>",
        template=_template(
            r"<\|(?:user|observation)\|>\s*",
            {
                "open_pattern": r"<tool_call>(?P<name>[^\s<]+)\s*",
                "close_pattern": r"</tool_call>\s*",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
                    "value_parser": {"name": "text", "args": {"strip": False}},
                },
            },
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
            {
                "open_pattern": r"<\|tool_call>call:(?P<name>[^\s{]+)",
                "close_pattern": r"<tool_call\|>\s*",
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            },
            reasoning_content={"open": "<|channel>thought", "close_pattern": r"<channel\|>\s*", "content": "text"},
        ),
    ),
    Family(
        name="lfm2",
        tag="<|tool_call_start|>",
        end="<|tool_call_end|>",
        in_channels=True,
        template=_template(
            _IM_END,
            {
                "open": "<|tool_call_start|>",
                "close": "<|tool_call_end|>",
                "content": "text",
                "transform": "{content}",  # a list of Python calls, parsed by `response_parser.py`
            },
        ),
    ),
)
