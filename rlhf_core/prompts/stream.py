"""The endless, reproducible stream of prompts that a run trains on, made from records.

`RecordStream` splits a source into held-out and training records and orders them; `PromptStream` also encodes
them. The record at a position depends only on the records, the seed and the options.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from ..errors import DataError
from ..protocols import PromptSource
from ..types import Message, Prompt
from ..util.rng import permutation, prompt_order

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SCAN_SIZE = 1024
"""Records encoded at once when lengths are checked."""
_REMEMBERED = 1024
"""Texts whose ids an encoder caches."""

Record = Mapping[str, Any]


def record_name(source: PromptSource, index: int) -> str:
    """A record's origin, for errors: the source's `describe(index)`, or its number."""
    describe = getattr(source, "describe", None)
    return str(describe(index)) if callable(describe) else f"record {index + 1}"


class RecordStream:
    """An endless stream over the training records of a source, reshuffled each epoch; the rest is held out."""

    def __init__(
        self,
        source: PromptSource,
        *,
        seed: int,
        held_out: int = 0,
        keep: Callable[[Sequence[Record], int], Sequence[bool]] | None = None,
    ) -> None:
        """Read every record once. `keep(records, first index)` selects the usable ones.

        Raises `DataError` when no training record is left.
        """
        self._source = source
        self._seed = seed
        usable, self.digest = _scan(source, keep)
        self.skipped = len(source) - len(usable)
        """Records that `keep` refused."""
        if len(usable) <= held_out:
            refused = f" ({self.skipped} more were refused)" if self.skipped else ""
            raise DataError(
                f"{len(usable)} usable records{refused}, {held_out} of them to be held out: none is left to train on",
                where="prompts",
                hint="give more data, or lower eval.num_prompts" if usable else "raise prompts.max_prompt_tokens",
            )
        split = permutation(len(usable), seed, "held-out")
        self._held_out = [usable[i] for i in split[:held_out]]
        self._training = array("q", sorted(usable[i] for i in split[held_out:]))
        # Two epochs: several makers read on both sides of the border.
        self._order = lru_cache(maxsize=2)(lambda epoch: array("q", prompt_order(len(self), seed, epoch)))

    def __len__(self) -> int:
        """Training records: one epoch."""
        return len(self._training)

    def index(self, position: int) -> int:
        """Index in the source of the record at `position` (>= 0) of the stream."""
        epoch, place = divmod(position, len(self))
        return self._training[self._order(epoch)[place]]

    def record(self, position: int) -> Record:
        """The training record at `position` of the endless stream."""
        return self._source[self.index(position)]

    def records(self, positions: Iterable[int]) -> list[Record]:
        return [self.record(position) for position in positions]

    def held_out_indices(self) -> list[int]:
        return list(self._held_out)

    def held_out_records(self) -> list[Record]:
        """The records that training never sees, always in the same order."""
        return [self._source[index] for index in self._held_out]


def _scan(
    source: PromptSource, keep: Callable[[Sequence[Record], int], Sequence[bool]] | None
) -> tuple[Sequence[int], str]:
    """Indices of the usable records, and a SHA-256 of all of them, in order."""
    digest = sha256()
    usable = array("q")
    for start in range(0, len(source), _SCAN_SIZE):
        records = [source[index] for index in range(start, min(start + _SCAN_SIZE, len(source)))]
        for record in records:
            digest.update(json.dumps(dict(record), sort_keys=True, default=str).encode() + b"\n")
        kept = keep(records, start) if keep is not None else [True] * len(records)
        usable.extend(start + offset for offset, is_kept in enumerate(kept) if is_kept)
    return usable, digest.hexdigest()


class PromptStream:
    """An endless stream of encoded prompts, and a fixed list of held-out ones for evaluation.

    A text prompt is encoded as it is, with the tokenizer's own special tokens; chat messages go through the
    tokenizer's own chat template, which ends where the answer begins. `text_as_chat` sends a text prompt
    through the template too, as one user message.
    """

    def __init__(
        self,
        source: PromptSource,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        held_out: int = 0,
        max_prompt_tokens: int | None = None,
        too_long: Literal["skip", "error"] = "skip",
        text_as_chat: bool = False,
        may_be_empty: bool = False,
    ) -> None:
        """Check every record. Raises `DataError` on one that is not a prompt, is too long under `error`, or on an
        empty stream.

        may_be_empty: allow prompts without tokens, for which an environment gives the first text.
        """
        self._may_be_empty = may_be_empty
        self._source = source
        self._encoder = PromptEncoder(tokenizer, text_as_chat=text_as_chat)
        self._max_prompt_tokens = max_prompt_tokens
        self._too_long = too_long
        self._records = RecordStream(source, seed=seed, held_out=held_out, keep=self._fits)

    def __len__(self) -> int:
        """Training prompts: one epoch."""
        return len(self._records)

    @property
    def skipped(self) -> int:
        """Prompts left out because they are too long."""
        return self._records.skipped

    @property
    def digest(self) -> str:
        """SHA-256 of all records, for the manifest."""
        return self._records.digest

    def prompt(self, position: int) -> Prompt:
        """The training prompt at `position` (>= 0) of the endless stream."""
        return self._encode(self._records.index(position), position)

    def evaluation_prompts(self) -> list[Prompt]:
        """The held-out prompts, numbered from 0 separately."""
        return [self._encode(index, place) for place, index in enumerate(self._records.held_out_indices())]

    def record(self, position: int) -> Record:
        return self._records.record(position)

    def held_out_records(self) -> list[Record]:
        return self._records.held_out_records()

    def _encode(self, index: int, position: int) -> Prompt:
        return self._encoder.prompt(self._source[index], position, record_name(self._source, index))

    def _fits(self, records: Sequence[Record], first: int) -> list[bool]:
        names = [record_name(self._source, first + offset) for offset in range(len(records))]
        lengths = self._encoder.lengths(records, names)
        if 0 in lengths and not self._may_be_empty:
            raise DataError("the prompt encodes to no tokens", where=names[lengths.index(0)])
        limit = self._max_prompt_tokens
        if limit is None:
            return [True] * len(records)
        fits = [length <= limit for length in lengths]
        if self._too_long == "error" and not all(fits):
            worst = fits.index(False)
            raise DataError(
                f"the prompt has {lengths[worst]} tokens, more than max_prompt_tokens ({limit})",
                where=names[worst],
                hint="raise prompts.max_prompt_tokens, or say prompts.too_long: skip",
            )
        return fits


class PromptEncoder:
    """Records to `Prompt`s with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, text_as_chat: bool = False) -> None:
        self._tokenizer = tokenizer
        self._text_as_chat = text_as_chat
        self.encode = lru_cache(maxsize=_REMEMBERED)(self._encode)

    def prompt(self, record: Record, position: int, name: str) -> Prompt:
        """Encode one record; errors call it `name`. Raises `DataError` on one that is not a prompt."""
        text, messages = self._render(record, name)
        return Prompt(
            position=position,
            text=text,
            prompt_ids=tuple(self._token_ids([text], special_tokens=messages is None)[0]),
            messages=messages,
            answer=record.get("answer"),
            metadata={key: value for key, value in record.items() if key not in ("prompt", "answer")},
        )

    def lengths(self, records: Sequence[Record], names: Sequence[str]) -> list[int]:
        """Tokens of each prompt."""
        rendered = [self._render(record, name) for record, name in zip(records, names, strict=True)]
        lengths = [0] * len(rendered)
        for is_text in (True, False):
            places = [place for place, (_, messages) in enumerate(rendered) if (messages is None) == is_text]
            if places:
                counts = self._count([rendered[place][0] for place in places], special_tokens=is_text)
                for place, count in zip(places, counts, strict=True):
                    lengths[place] = count
        return lengths

    def _encode(self, text: str) -> tuple[int, ...]:
        """The ids of a text prompt, with the tokenizer's own special tokens."""
        return tuple(self._token_ids([text], special_tokens=True)[0])

    def _count(self, texts: list[str], *, special_tokens: bool) -> list[int]:
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if not hasattr(backend, "encode_batch_fast"):
            return [len(ids) for ids in self._token_ids(texts, special_tokens=special_tokens)]
        # Several times faster than calling the tokenizer, which makes lists of everything. A call sets these
        # two, so the settings of an earlier call must be undone here.
        backend.no_truncation()
        backend.no_padding()
        return [len(encoded) for encoded in backend.encode_batch_fast(texts, add_special_tokens=special_tokens)]

    def _token_ids(self, texts: list[str], *, special_tokens: bool) -> list[list[int]]:
        # A chat template writes its special tokens itself; verbose=False: lengths are our own business.
        encoded = self._tokenizer(texts, add_special_tokens=special_tokens, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def _render(self, record: Record, name: str) -> tuple[str, tuple[Message, ...] | None]:
        """The text the model continues and, for a chat, its messages."""
        prompt = record.get("prompt")
        if prompt is None and "messages" in record:
            prompt = _before_last_answer(record["messages"], name)
        if isinstance(prompt, str) and not self._text_as_chat:
            return prompt, None
        if isinstance(prompt, str):
            messages: tuple[Message, ...] = ({"role": "user", "content": prompt},)
        else:
            messages = _check_messages(prompt, record, name)
        return self._apply_template(messages, name), messages

    def _apply_template(self, messages: tuple[Message, ...], name: str) -> str:
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise DataError(
                "the prompt is a list of chat messages, but this model's tokenizer has no chat template",
                where=name,
                hint="use a chat model, or write the prompts as text",
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:  # templates reject messages that the model was not trained on
            raise DataError(f"the tokenizer's chat template refuses the messages: {error}", where=name) from error
        return str(text)


def _before_last_answer(messages: object, name: str) -> object:
    """The part of a conversation (`messages`) before the assistant's last turn."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise DataError(f"`messages` is {_kind(messages)}, not a list of chat messages", where=name)
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    last = len(roles) - 1 - roles[::-1].index("assistant") if "assistant" in roles else len(roles)
    return messages[:last]


def _check_messages(prompt: object, record: Record, name: str) -> tuple[Message, ...]:
    if prompt is None:
        known = ", ".join(chain(map(str, record))) or "none"
        raise DataError(f"there is no `prompt` (keys: {known})", where=name)
    if not isinstance(prompt, Sequence) or not prompt:
        raise DataError(f"`prompt` is {_kind(prompt)}, not text or a list of chat messages", where=name)
    for message in prompt:
        if not (isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message):
            raise DataError(f"a chat message needs `role` and `content`, got {message!r:.100}", where=name)
    return tuple(prompt)


def _kind(value: object) -> str:
    return "an empty list" if isinstance(value, list | tuple) and not value else f"a {type(value).__name__}"
