"""Encoding of records to token ids, from text or from chat messages by the tokenizer's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..columns import Column, Columns, check_owners
from ..errors import DataError, PluginError, first_line
from ..models.kinds import ModelKind
from ..types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CACHE_SIZE = 1024
"""Number of texts whose ids an encoder caches."""

Record = Mapping[str, Any]


class Refusal(Exception):
    """Raised if a chat template rejects messages, with its reason as text."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    prompt: bool = True,
) -> str:
    """Render a conversation with the tokenizer's template, followed by its generation prompt if `prompt` is set.

    Raises `Refusal`, since templates reject messages that the model was not trained on.
    """
    plain: Any = [dict(message) for message in messages]
    schemas: Any = [dict(tool) for tool in tools] or None
    try:
        return str(tokenizer.apply_chat_template(plain, tools=schemas, tokenize=False, add_generation_prompt=prompt))
    except Exception as error:  # a template is a program that comes with a model: it may recurse or overflow
        raise Refusal(first_line(error)) from error


class PromptEncoder:
    """Encodes records to `Prompt`s with one tokenizer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        kind: ModelKind | None = None,
        columns: Mapping[str, Column] | None = None,
    ) -> None:
        """Create an encoder. Raises `PluginError` for a column that is not per prompt.

        Args:
            tokenizer: The policy's tokenizer.
            kind: Kind of the model that receives the prompts. None if only text is encoded.
            columns: Columns of the source. Records contain their values.
        """
        self._tokenizer = tokenizer
        self._kind = kind
        self._own_columns = columns or {}
        of_kind = {} if kind is None else kind.columns
        check_owners([("the source of prompts", self._own_columns), (type(kind).__name__, of_kind)])
        self.columns = {**self._own_columns, **of_kind}
        """All columns of a prompt."""
        if wrong := [name for name, column in self.columns.items() if column.per != "prompt"]:
            raise PluginError(f"the column {wrong[0]!r} of prompts is not per prompt", hint="report it to its authors")
        self.encode = lru_cache(maxsize=_CACHE_SIZE)(self._encode)

    def prompt(self, record: Record, position: int, name: str) -> Prompt:
        """Encode one record, which errors call `name`. Raises `DataError` for an invalid record."""
        text, messages = self._render(record, name)
        ids, columns = self._with_columns(record, self._token_ids([text], special_tokens=messages is None)[0], name)
        return Prompt(
            position=position,
            text=text,
            prompt_ids=tuple(ids),
            messages=messages,
            answer=record.get("answer"),
            metadata={key: value for key, value in record.items() if key not in ("prompt", "answer")},
            columns=columns,
        )

    def _with_columns(self, record: Record, ids: Sequence[int], name: str) -> tuple[Sequence[int], Columns]:
        try:
            ids, values = (ids, {}) if self._kind is None else self._kind.encode(record, ids)
            return ids, Columns({**{each: record[each] for each in self._own_columns}, **values}, self.columns)
        except (DataError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"the columns of its prompt cannot be read: {first_line(error)}", where=name) from error

    def lengths(self, records: Sequence[Record], names: Sequence[str]) -> list[int]:
        """Return the number of tokens of each prompt. `names`: names of the records in errors."""
        if self.columns or (self._kind is not None and type(self._kind).encode is not ModelKind.encode):
            pairs = zip(records, names, strict=True)
            return [len(self.prompt(record, 0, name).prompt_ids) for record, name in pairs]
        rendered = [self._render(record, name) for record, name in zip(records, names, strict=True)]
        texts: dict[bool, list[str]] = {True: [], False: []}
        for text, messages in rendered:
            texts[messages is None].append(text)
        counts = {is_text: iter(self._count(each, special_tokens=is_text)) for is_text, each in texts.items() if each}
        return [next(counts[messages is None]) for _, messages in rendered]

    def _encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text prompt, including the tokenizer's special tokens."""
        return tuple(self._token_ids([text], special_tokens=True)[0])

    def _count(self, texts: list[str], *, special_tokens: bool) -> list[int]:
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if not hasattr(backend, "encode_batch_fast"):
            return [len(ids) for ids in self._token_ids(texts, special_tokens=special_tokens)]
        # Several times faster than calling the tokenizer, which converts all results to lists. Truncation and padding
        # of earlier tokenizer calls persist in the backend, so they are reset.
        backend.no_truncation()
        backend.no_padding()
        return [len(encoded) for encoded in backend.encode_batch_fast(texts, add_special_tokens=special_tokens)]

    def _token_ids(self, texts: list[str], *, special_tokens: bool) -> list[list[int]]:
        # A chat template writes its special tokens itself. verbose=False disables warnings about lengths.
        encoded = self._tokenizer(texts, add_special_tokens=special_tokens, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def _render(self, record: Record, name: str) -> tuple[str, tuple[Message, ...] | None]:
        """Return the text that the model continues and, for a chat, its messages."""
        prompt = prompt_of(record, name)
        return (prompt, None) if isinstance(prompt, str) else (self._apply_template(prompt, name), prompt)

    def _apply_template(self, messages: tuple[Message, ...], name: str) -> str:
        if not self._tokenizer.chat_template:
            raise DataError(
                "the prompt is a list of chat messages, but this model's tokenizer lacks a chat template",
                where=name,
                hint="use a chat model, or write the prompts as text",
            )
        try:
            return render_chat(self._tokenizer, messages)
        except Refusal as error:
            raise DataError(f"the tokenizer's chat template refuses the messages: {error}", where=name) from error


def _before_last_answer(messages: object, name: str) -> object:
    """Return the part of a conversation (`messages`) before the assistant's last turn."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise DataError(f"`messages` is {_type_name(messages)}, not a list of chat messages", where=name)
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    last = len(roles) - 1 - roles[::-1].index("assistant") if "assistant" in roles else len(roles)
    return messages[:last]


def prompt_of(record: Record, name: str) -> str | tuple[Message, ...]:
    """Return the text or the chat messages of a record, without encoding. Raises `DataError` if it has neither.

    Example:
        >>> chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
        >>> prompt_of({"messages": chat}, "line 1")
        ({'role': 'user', 'content': '1+1='},)
    """
    prompt = record.get("prompt")
    if prompt is None and "messages" in record:
        prompt = _before_last_answer(record["messages"], name)
    return prompt if isinstance(prompt, str) else check_messages(prompt, record, name)


def check_messages(prompt: object, record: Record, name: str) -> tuple[Message, ...]:
    """Return the chat messages of a record, which errors call `name`. Raises `DataError` if they are invalid."""
    if prompt is None:
        known = ", ".join(chain(map(str, record))) or "none"
        raise DataError(f"`prompt` is missing (keys: {known})", where=name)
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        raise DataError(f"`prompt` is {_type_name(prompt)}, not text or a list of chat messages", where=name)
    for message in prompt:
        if not (isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message):
            raise DataError(f"a chat message needs `role` and `content`, got {message!r:.100}", where=name)
        if not isinstance(content := message["content"], str | None):  # a tool call may lack content
            hint = "give it as one text, or read images with a source of prompts that accepts them"
            raise DataError(f"`content` is {_type_name(content)}, not text", where=name, hint=hint)
    return tuple(prompt)


def _type_name(value: object) -> str:
    return "an empty list" if isinstance(value, list | tuple) and not value else f"a {type(value).__name__}"
