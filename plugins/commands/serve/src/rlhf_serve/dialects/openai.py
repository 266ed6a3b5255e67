"""Parts that all APIs of OpenAI have in common: errors, the list of models and log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_episodes import TokenLogprob
from rlhf_web import Refused

from ..wire import encode

_PARAMS = {"previous_response_not_found": "previous_response_id"}
"""Codes of errors that name a field, for clients that look at `param`."""


def error_body(refused: Refused) -> bytes:
    """Encode an error in the form that OpenAI's clients read."""
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    error = {"message": str(refused), "type": kind, "param": _PARAMS.get(refused.code), "code": refused.code}
    return encode({"error": error})


def models_body(name: str) -> bytes:
    """Encode the list of models, which has one entry."""
    return encode({"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "rlhf"}]})


def token_logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return the log-probs of an answer's tokens, with the most likely tokens at each position."""
    return [
        {**_token(each.text, each.logprob), "top_logprobs": [_token(text, logprob) for text, logprob in each.top]}
        for each in tokens
    ]


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    """A token in the form of chat completions. Its bytes are null if it is a part of a character."""
    is_complete = bool(text) and "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_complete else None}
