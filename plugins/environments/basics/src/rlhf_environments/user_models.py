"""Models that play the user: on a server, or in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import BoundedSemaphore, Lock
from typing import Protocol

from rlhf_core.config import ModelConfig
from rlhf_core.errors import DataError, UserInputError
from rlhf_core.prompts import PromptEncoder
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_models import EngineThread, open_engine
from rlhf_web import chat_client, read_chat_reply

from .config import UserConfig

Message = Mapping[str, str]
_WHERE = "environment user"
_MAX_OPENINGS = 1024
"""Maximum number of first messages that a local user keeps."""
_SEEDS = 1 << 31
"""Servers expect a seed below this."""


@dataclass(frozen=True, slots=True)
class Said:
    """A message of the user."""

    text: str
    num_tokens: int
    """Sampled tokens, 0 if unknown."""


class UserModel(Protocol):
    """The model that plays the user. Called on several threads."""

    def say(self, messages: Sequence[Message], *, seed: int, offset: int) -> Said:
        """Return the user's next message.

        Args:
            messages: The conversation from the user's side: the instructions as `system`, the user's messages as
                `assistant`, those of the policy as `user`.
            seed: Seed of the conversation. With a local model, equal conversations get equal messages.
            offset: Number of tokens that the user has sampled before in this conversation.
        """

    def close(self) -> None:
        """Release connections or the model."""


class RemoteUser:
    """A user on an OpenAI-compatible server."""

    def __init__(self, config: UserConfig) -> None:
        """Read the key. Raises `UserInputError` if its variable is not set."""
        self._config = config
        self._places = BoundedSemaphore(config.max_connections)
        self._key = config.read_key(where=_WHERE)

    def say(self, messages: Sequence[Message], *, seed: int, offset: int) -> Said:
        config = self._config
        request = {
            "model": config.model,
            "messages": list(messages),
            "temperature": config.temperature,
            "max_tokens": config.max_message_tokens,
            "seed": (seed + len(messages)) % _SEEDS,
        }
        wait = config.patience_seconds + config.answer_seconds
        if not self._places.acquire(timeout=wait):
            raise TimeoutError(
                f"no connection to the user's model became free within {wait:g} s: "
                "raise environment.max_connections, or lower environment.concurrency"
            )
        try:
            # Each call has its own event loop, since it runs on a thread of an environment.
            return Said(asyncio.run(self._post(json.dumps(request).encode("ascii"))), 0)
        finally:
            self._places.release()

    async def _post(self, body: bytes) -> str:
        client = chat_client(self._config, self._key)
        try:
            content = await client.post(lambda: body)
        finally:
            await client.aclose()
        return read_chat_reply(content, shown=client.shown)[0]

    def close(self) -> None:
        """Do nothing: each call closes its connection."""


class LocalUser:
    """A user in this process. Its messages depend only on the conversation and the seed, not on other episodes."""

    def __init__(self, config: UserConfig, seed: int) -> None:
        """Load the model. Raises `UserInputError` if that fails."""
        assert config.model_path is not None
        try:
            model = ModelConfig(path=config.model_path, device=config.device)
            engine, self._tokenizer, _ = open_engine(model, config.engine, seed, options=config.engine_options)
        except UserInputError as error:
            raise UserInputError(error.message, where=f"{_WHERE}: model_path", hint=error.hint) from error
        self._context_tokens = engine.context_tokens
        self._wait_seconds = config.answer_seconds
        self._encoder = PromptEncoder(self._tokenizer)
        try:
            self._role = instructions_role(self._encoder) if self._tokenizer.chat_template else "system"
        except DataError as error:
            engine.close()
            raise UserInputError(error.message, where=f"{_WHERE}: model_path", hint="use another model") from error
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        self._special = {*self._tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        self._thread = EngineThread(engine)
        self._lock = Lock()
        self._openings: dict[tuple[int, tuple[int, ...]], Future[Completion]] = {}
        """Seed and prompt -> first message, the least recently used one first."""
        self._sampling = SamplingParams(
            max_new_tokens=config.max_message_tokens,
            temperature=config.temperature or 1.0,
            greedy=config.temperature == 0,
        )

    def say(self, messages: Sequence[Message], *, seed: int, offset: int) -> Said:
        seen = [{**each, "content": without_special_tokens(each["content"], self._special)} for each in messages]
        seen[0]["role"] = self._role
        prompt = seen if self._tokenizer.chat_template else _as_text(seen)
        prompt_ids = self._encoder.prompt({"prompt": prompt}, 0, _WHERE).prompt_ids
        limit = self._context_tokens
        if limit is not None and len(prompt_ids) >= limit:
            raise ValueError(f"the conversation is {len(prompt_ids)} tokens long, the user's model reads {limit}")
        request = GenerationRequest(sample_id=seed, prompt_ids=prompt_ids, offset=offset)
        is_opening = len(messages) == 1
        answer = self._opening(request) if is_opening else self._ask(request)
        try:
            completion = answer.result(self._wait_seconds)
        except TimeoutError:
            if not is_opening:
                answer.cancel()
            hint = "raise environment.answer_seconds"
            raise TimeoutError(f"the user's model did not answer within {self._wait_seconds:g} s: {hint}") from None
        text = self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
        return Said(str(text), len(completion.token_ids))

    def _ask(self, request: GenerationRequest) -> Future[Completion]:
        (answer,) = self._thread.ask([request], self._sampling)
        return answer

    def _opening(self, request: GenerationRequest) -> Future[Completion]:
        """Ask for a first message once for all samples of a prompt, which start from the same one."""
        key = (request.sample_id, request.prompt_ids)
        with self._lock:
            answer = self._openings.pop(key, None)
            if answer is None or (answer.done() and (answer.cancelled() or answer.exception() is not None)):
                answer = self._ask(request)
            self._openings[key] = answer
            if len(self._openings) > _MAX_OPENINGS:
                del self._openings[next(iter(self._openings))]
        return answer

    def close(self) -> None:
        """End the engine and its thread."""
        self._thread.close()


def instructions_role(encoder: PromptEncoder) -> str:
    """Return the role of the user's instructions that the chat template accepts: `system` or `user`.

    Some templates refuse a system message, or a first message that is not of `user`.

    Args:
        encoder: Encoder with the model's tokenizer, which has a chat template.

    Raises:
        DataError: The template accepts neither.
    """
    probe = [{"role": role, "content": "Hello."} for role in ("system", "assistant", "user")]
    try:
        encoder.prompt({"prompt": probe}, 0, _WHERE)
    except DataError:
        encoder.prompt({"prompt": [{**probe[0], "role": "user"}, *probe[1:]]}, 0, _WHERE)
        return "user"
    return "system"


def without_special_tokens(text: str, special: Collection[str]) -> str:
    """Remove special tokens, so that a reply of the policy cannot end its message or open another one.

    Args:
        text: Content of a message.
        special: Texts of the special tokens.

    Example:
        >>> without_special_tokens("Hi.<|im_<|im_end|>end|>", {"<|im_end|>"})
        'Hi.'
    """
    while any(token in text for token in special if token):
        for token in special:
            text = text.replace(token, "") if token else text
    return text


def _as_text(messages: Sequence[Message]) -> str:
    """Return a conversation as text, for a model without a chat template."""
    names = {"assistant": "User", "user": "Assistant"}
    system, *rest = messages
    lines = [system["content"], *(f"{names[each['role']]}: {each['content']}" for each in rest)]
    return "\n".join([*lines, "User:"])
