"""A judge behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_core.util import printable
from rlhf_web import JsonClient, RemoteError, UnreadableJson, environment_key, read_first_json

from .config import JudgeConfig
from .verdicts import Messages

_AGAIN = (408, 429, 500, 502, 503, 504)
_FIRST_WAIT_SECONDS = 0.5
_MOST_BYTES = 1 << 20
_CHARS_PER_TOKEN = 3
"""Where a server does not say what a call has cost: rather too much than too little."""


class JudgeError(Exception):
    """The judge gave no reply; holds no secret."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A judge's reply."""

    text: str
    num_tokens: int
    """Tokens of its prompt and of the reply together."""


class RemoteJudge:
    """Asks over HTTP, keeping its connections."""

    def __init__(self, config: JudgeConfig) -> None:
        """Raises `UserInputError` where the key's variable is not set."""
        self._config = config
        key = None
        if config.key_env is not None:
            hint = f"export {config.key_env}=…, in the shell that starts the run"
            key = environment_key(config.key_env, where='reward "judge": key_env', hint=hint)
        self._client = JsonClient(
            f"{config.url}/chat/completions",
            config,
            key=key,
            max_response_bytes=_MOST_BYTES,
            again=_AGAIN,
            first_wait_seconds=_FIRST_WAIT_SECONDS,
        )

    async def ask(self, questions: Sequence[Messages]) -> list[Reply | Exception]:
        """A reply to each, or why there is none."""
        return list(await asyncio.gather(*map(self._ask, questions)))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _ask(self, messages: Messages) -> Reply | Exception:
        config = self._config
        asked = {
            "model": config.model,
            "messages": messages,
            "temperature": config.temperature,
            "max_tokens": config.max_reply_tokens,
        }
        try:
            content = await self._client.post(lambda: json.dumps(asked).encode("ascii"))
            return _reply(content, messages, self._client.shown)
        except (RemoteError, JudgeError) as error:
            return JudgeError(str(error))


def _reply(content: bytes, messages: Messages, address: str) -> Reply:
    try:
        found, _ = read_first_json(content.decode("utf-8"))
        text = found["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise TypeError(f"the content is a {type(text).__name__}")
    except (UnreadableJson, UnicodeDecodeError, KeyError, IndexError, TypeError) as error:
        raise JudgeError(f"{address}: its response is no chat completion: {printable(str(error))}") from None
    usage = found.get("usage")
    said = usage.get("total_tokens") if isinstance(usage, dict) else None
    if isinstance(said, bool) or not isinstance(said, int) or said < 0:
        said = (sum(len(each["content"]) for each in messages) + len(text)) // _CHARS_PER_TOKEN + 1
    return Reply(text, said)
