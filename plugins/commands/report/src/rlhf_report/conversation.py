"""A sample as terminal lines: the prompt, then an answer or the turns of an episode."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def conversation_lines(sample: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a sample from `samples.jsonl`, texts uncut; `>` marks what the policy reads."""
    yield from _indented("  > ", sample.get("prompt"))
    turns = sample.get("turns")
    if not isinstance(turns, list):
        yield from _indented("    ", sample.get("completion"))
        return
    number = 0
    for turn in turns:
        if not isinstance(turn, Mapping):  # a line of a file that was written to by hand
            continue
        if turn.get("role") != "policy":
            yield "  environment"
            yield from _indented("  > ", turn.get("text"))
            continue
        number += 1
        reward = turn.get("reward")
        yield f"  policy, turn {number}" + (f"  reward {reward:.4g}" if isinstance(reward, int | float) else "")
        yield from _indented("    ", turn.get("text"))
        for call in turn.get("tool_calls") or ():
            yield from _indented("    ", _call(call))


def _call(call: Any) -> str:
    if not isinstance(call, Mapping):
        return f"calls {call!r}"
    if call.get("error"):
        return f"bad call: {call['error']}"
    return f"calls {call.get('name')} {json.dumps(call.get('arguments'), ensure_ascii=False)}"


def _indented(mark: str, text: Any) -> Iterator[str]:
    return (f"{mark}{line}" for line in str(text or "").splitlines() or [""])
