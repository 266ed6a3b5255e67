"""Formats a sample as terminal lines: the prompt, then an answer or the turns of an episode."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def conversation_lines(sample: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a sample from `samples.jsonl` with uncut texts. `>` marks the policy's input.

    Example:
        >>> list(conversation_lines({"prompt": "1 + 1 =", "completion": "2"}))
        ['  > 1 + 1 =', '    2']
    """
    yield from _indent("  > ", sample.get("prompt"))
    turns = sample.get("turns")
    if not isinstance(turns, list):
        yield from _indent("    ", sample.get("completion"))
        return
    number = 0
    for turn in turns:
        if not isinstance(turn, Mapping):  # the file may have been edited
            continue
        if turn.get("role") != "policy":
            yield "  environment"
            yield from _indent("  > ", turn.get("text"))
            continue
        number += 1
        reward = turn.get("reward")
        yield f"  policy, turn {number}" + (f"  reward {reward:.4g}" if isinstance(reward, int | float) else "")
        yield from _indent("    ", turn.get("text"))
        for call in turn.get("tool_calls") or ():
            yield from _indent("    ", _call_text(call))


def _call_text(call: Any) -> str:
    if not isinstance(call, Mapping):
        return f"calls {call!r}"
    if call.get("error"):
        return f"bad call: {call['error']}"
    return f"calls {call.get('name')} {json.dumps(call.get('arguments'), ensure_ascii=False)}"


def _indent(prefix: str, text: Any) -> Iterator[str]:
    return (f"{prefix}{line}" for line in str(text or "").splitlines() or [""])
