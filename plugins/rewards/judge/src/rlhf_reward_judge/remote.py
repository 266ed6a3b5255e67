"""A judge on an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_web import RemoteError, chat_client, read_chat_reply

from .config import JudgeConfig
from .verdicts import Messages

_CHARS_PER_TOKEN = 3
"""Estimates the tokens of a call if the server does not report them, rather too high than too low."""


class JudgeError(Exception):
    """The judge did not return a usable reply. The message contains no secrets."""


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """A judge's reply."""

    text: str
    num_tokens: int
    """Tokens of prompt and reply together."""


class RemoteJudge:
    """A judge that is called over HTTP, with connection reuse."""

    def __init__(self, config: JudgeConfig) -> None:
        """Create the client. Raises `UserInputError` if the key's variable is not set."""
        self._config = config
        self._client = chat_client(config, config.read_key(where='reward "judge"'))

    async def ask(self, questions: Sequence[Messages]) -> list[JudgeReply | Exception]:
        """Return a reply to each question, or the error of a failed one."""
        return list(await asyncio.gather(*map(self._ask, questions)))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _ask(self, messages: Messages) -> JudgeReply | Exception:
        config = self._config
        request = {
            "model": config.model,
            "messages": messages,
            "temperature": config.temperature,
            "max_tokens": config.max_reply_tokens,
        }
        try:
            content = await self._client.post(lambda: json.dumps(request).encode("ascii"))
            return _read_reply(content, messages, self._client.shown)
        except (RemoteError, JudgeError) as error:
            return JudgeError(str(error))


def _read_reply(content: bytes, messages: Messages, address: str) -> JudgeReply:
    try:
        text, response = read_chat_reply(content, shown=address)
    except ValueError as error:
        raise JudgeError(str(error)) from None
    usage = response.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        tokens = (sum(len(_text_of(each["content"])) for each in messages) + len(text)) // _CHARS_PER_TOKEN + 1
    return JudgeReply(text, tokens)


def _text_of(content: Any) -> str:
    """Return the text of a message's content, without images."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
