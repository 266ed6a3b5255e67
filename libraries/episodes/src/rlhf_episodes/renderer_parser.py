"""Replies read by the package `renderers`, which contains the formats of some model families that transformers lacks.

Used in child processes only: its regular expressions run on untrusted model output, and its import takes a second. The
process `python -m rlhf_episodes.renderer_parser` finds the renderer of a tokenizer (`renderer_formats.py`), and
`response_parser.py` reads replies.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rlhf_containment.processes.asked import serve_requests

_NEEDS_NETWORK = "gpt-oss"
"""Downloads its vocabulary. `response_templates.py` has this format."""
_CUT = frozenset({"unclosed_block", "malformed_structure"})


class MarkerTokenizer:
    """Encodes text as one id for each added token of a tokenizer and for each other character.

    Renderers find the parts of a conversation by the ids of added tokens. Their texts do not depend on the other ids.

    Example:
        >>> tokenizer = MarkerTokenizer(["<think>"], eos=None)
        >>> tokenizer.encode("<think>a"), tokenizer.decode(tokenizer.encode("<think>a"))
        ([0, 98], '<think>a')
    """

    unk_token_id = None
    name_or_path = ""

    def __init__(self, tokens: Iterable[str], *, eos: str | None) -> None:
        self._tokens = sorted(tokens, key=len, reverse=True)
        self._ids = {token: number for number, token in enumerate(self._tokens)}
        self.eos_token_id = None if eos is None else self._ids.get(eos)

    def encode(self, text: str, **_: Any) -> list[int]:
        """Encode a text. Options of other tokenizers are accepted and ignored."""
        number = len(self._tokens)
        present = [token for token in self._tokens if token in text]  # some tokenizers have thousands of added tokens
        parts = re.findall("|".join([*map(re.escape, present), "."]), text, re.DOTALL)
        return [self._ids[part] if part in self._ids else number + ord(part) for part in parts]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Decode ids, by default with the added tokens."""
        number = len(self._tokens)
        shown = [token for token in token_ids if token >= number or not skip_special_tokens]
        return "".join(self._tokens[token] if token < number else chr(token - number) for token in shown)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of an added token, or None."""
        return self._ids.get(token)


def parse(reader: dict[str, Any], text: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Parse a reply into a message.

    Args:
        reader: Name of the renderer, added tokens and EOS of the tokenizer.
        text: The reply with its special tokens.
        tools: Schemas of the tools.

    Returns:
        `content`, `reasoning_content` (None without a thought) and `tool_calls`, of which a call that could not be read
        has the key `error` instead of `function`.
    """
    tokenizer = MarkerTokenizer(reader["tokens"], eos=reader["eos"])
    parsed = _renderer(reader["renderer"], tokenizer).parse_response(tokenizer.encode(text), tools=tools or None)
    calls = [_call(call) for call in parsed.tool_calls]
    return {"content": parsed.content, "reasoning_content": parsed.reasoning_content, "tool_calls": calls}


def _call(call: Any) -> dict[str, Any]:
    # A value of another type than its schema's counts as invalid JSON. The environment describes that problem better.
    if not call.name or not isinstance(call.arguments, dict) or call.status in _CUT:
        return {"error": call.status.replace("_", " ")}
    return {"function": {"name": call.name, "arguments": call.arguments}}


def _renderer(name: str, tokenizer: MarkerTokenizer) -> Any:
    from renderers import config_from_name, create_renderer

    return create_renderer(tokenizer, config_from_name(name))


def find_renderer(request: bytes) -> bytes:
    """Return the name of the first renderer that writes all examples like the chat template, or null, as JSON.

    Args:
        request: JSON list of the tokenizer's added tokens, its EOS, and the examples: messages, tools, and the text of
            the chat template.
    """
    from renderers.base import MODEL_RENDERER_MAP

    tokens, eos, examples = json.loads(request)
    tokenizer = MarkerTokenizer(tokens, eos=eos)
    names = (name for name in dict.fromkeys(MODEL_RENDERER_MAP.values()) if name != _NEEDS_NETWORK)
    return json.dumps(next((name for name in names if _writes(name, tokenizer, examples)), None)).encode()


def _writes(name: str, tokenizer: MarkerTokenizer, examples: Sequence[Any]) -> bool:
    try:
        renderer = _renderer(name, tokenizer)
        return all(
            tokenizer.decode(renderer.render_ids(messages, tools=tools or None)) == text
            for messages, tools, text in examples
        )
    except Exception:  # the tokenizer lacks its tokens, or it refuses the messages
        return False


if __name__ == "__main__":
    serve_requests(int(sys.argv[1]), int(sys.argv[2]), find_renderer)
