"""Replies as actions and observations as text. Both come from others: the model, and the server."""

from __future__ import annotations

import json
from typing import Any

from rlhf_web import UnreadableJson, read_first_json

MAX_OBSERVATION_CHARS = 1_000_000


class NoAction(Exception):
    """A reply has no action that the environment takes; the text can be told to the policy."""


def action_of(reply: str, field: str | None) -> dict[str, Any]:
    """The action that a reply says: its text as `field`, or the JSON object in it, after what the model thought.

    Raises `NoAction`.
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
    """The text of an observation for the policy. Raises `ValueError` where there is none, or it cannot be shown."""
    if not isinstance(observation, dict):
        raise ValueError(f"gave an observation that is a {type(observation).__name__}")
    if field is not None and field not in observation:
        known = ", ".join(map(str, observation))
        raise ValueError(f'gave an observation without "{field}"; it has: {known or "nothing"}'[:1000])
    shown = observation if field is None else observation[field]
    text = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
    if len(text) > MAX_OBSERVATION_CHARS:
        raise ValueError(f"gave an observation of {len(text)} characters, more than {MAX_OBSERVATION_CHARS}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("gave an observation with half of a surrogate pair, which is no text") from None
    return text
