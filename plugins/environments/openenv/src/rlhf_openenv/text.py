"""Converts replies to actions and observations to text. Both are untrusted input."""

from __future__ import annotations

import json
from typing import Any

from rlhf_web import UnreadableJson, read_first_json

MAX_OBSERVATION_CHARS = 1_000_000


class NoAction(Exception):
    """A reply does not contain a valid action. The text can be shown to the policy."""


def action_of(reply: str, field: str | None) -> dict[str, Any]:
    """Parse the action in a reply, after the thought: its text as `field`, or the first JSON object in it.

    Raises `NoAction` if a JSON object is missing or invalid.

    Example:
        >>> action_of('<think>3?</think>I guess {"number": 3}', None)
        {'number': 3}
        >>> action_of(" Hello. ", "message")
        {'message': 'Hello.'}
    """
    text = reply.rpartition("</think>")[2]
    if field is not None:
        return {field: text.strip()}
    start = text.find("{")
    if start < 0:
        raise NoAction("there is no JSON object in this reply")
    try:
        action, _ = read_first_json(text, start)
    except UnreadableJson as error:
        raise NoAction(str(error)) from None
    assert isinstance(action, dict)
    return action


def text_of(observation: Any, field: str | None) -> str:
    """Return an observation, or one field of it, as text. Raises `ValueError` if it is missing or invalid.

    OpenEnv's own field `metadata` is shown only if it is selected.

    Example:
        >>> text_of({"board": [0, 1], "hint": "warm"}, "hint")
        'warm'
    """
    if not isinstance(observation, dict):
        raise ValueError(f"returned an observation of the type {type(observation).__name__}, not dict")
    if field is not None and field not in observation:
        known = ", ".join(map(str, observation))
        raise ValueError(f'returned an observation without "{field}" (its fields: {known or "none"})'[:1000])
    whole = {name: value for name, value in observation.items() if name != "metadata"}
    shown = whole if field is None else observation[field]
    text = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
    if len(text) > MAX_OBSERVATION_CHARS:
        raise ValueError(f"returned an observation of {len(text)} characters, more than {MAX_OBSERVATION_CHARS}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("returned an observation with a lone surrogate, which is invalid text") from None
    return text
