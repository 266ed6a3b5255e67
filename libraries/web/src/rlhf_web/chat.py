"""Calls of a chat model on an OpenAI-compatible server."""

from __future__ import annotations

from typing import Any

from rlhf_core.util import printable

from .chat_options import ChatModelOptions
from .client import JsonClient
from .servers import ClientOptions
from .untrusted_json import UnreadableJson, read_first_json

_AGAIN = (408, 429, 500, 502, 503, 504)
_FIRST_WAIT_SECONDS = 0.5
_MAX_RESPONSE_BYTES = 1 << 20


def chat_client(options: ChatModelOptions, key: str | None) -> JsonClient:
    """Create a client of chat completions. It is used on one event loop, and closed there.

    Args:
        options: With `url`.
        key: From `options.read_key`.

    Returns:
        The client, without an open connection.
    """
    return model_client(f"{options.url}/chat/completions", options, key, max_response_bytes=_MAX_RESPONSE_BYTES)


def model_client(url: str, options: ClientOptions, key: str | None, *, max_response_bytes: int) -> JsonClient:
    """Create a client of a path of an OpenAI-compatible server. It is used on one event loop, and closed there.

    Args:
        url: Address of the path.
        options: Numbers of connections and timeouts.
        key: Sent as `Authorization: Bearer`. None sends none.
        max_response_bytes: Maximum size of a response.

    Returns:
        The client, without an open connection. It repeats requests while the server is busy or unavailable.
    """
    return JsonClient(
        url,
        options,
        key=key,
        max_response_bytes=max_response_bytes,
        again=_AGAIN,
        first_wait_seconds=_FIRST_WAIT_SECONDS,
    )


def read_chat_reply(content: bytes, *, shown: str) -> tuple[str, dict[str, Any]]:
    """Read the text of a chat completion.

    Args:
        content: Body of the response.
        shown: `JsonClient.shown`, for errors.

    Returns:
        The text of the first choice, and the whole response.

    Raises:
        ValueError: It is not a chat completion. The message contains no secrets.
    """
    try:
        response, _ = read_first_json(content.decode("utf-8"))
        text = response["choices"][0]["message"]["content"]
        problem = None if isinstance(text, str) else f"the content is a {type(text).__name__}"
    except (UnreadableJson, UnicodeDecodeError, KeyError, IndexError, TypeError) as error:
        problem = printable(str(error))
    if problem is not None:
        raise ValueError(f"{shown}: its response is not a chat completion: {problem}")
    return text, response
