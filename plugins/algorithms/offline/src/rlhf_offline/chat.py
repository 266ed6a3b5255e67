"""Turns whole conversations into examples in which only the assistant's turns are learnt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import DataError, first_line

from .examples import Example

Turns = Literal["all", "last"]
Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The block by which a chat template marks the assistant's text."""


def conversation_example(messages: Messages, tokenizer: PreTrainedTokenizerBase, *, turns: Turns) -> Example:
    """The conversation in the model's own chat template; learnt are all assistant turns, or the last.

    Where the template marks what the assistant writes (`{% generation %}`) the marks decide; else a turn is what
    the template adds for it, its end-of-turn token included. Raises `DataError`.
    """
    if not any(message.get("role") == "assistant" for message in messages):
        raise DataError("no message of the conversation is the assistant's", where="sft")
    if not tokenizer.chat_template:
        raise DataError(
            "the record is a conversation, but this model's tokenizer has no chat template",
            where="sft",
            hint="use a chat model, or write prompt and completion as text",
        )
    if _GENERATION.search(str(tokenizer.chat_template)):
        ids, learnt = _marked(messages, tokenizer)
    else:
        ids, learnt = _by_prefixes(messages, tokenizer)
    if turns == "last":
        learnt = _last_run(learnt)
    return Example(torch.tensor(ids, dtype=torch.int64), torch.tensor(learnt, dtype=torch.bool))


def _marked(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    with _refusals():
        encoded: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages], return_dict=True, return_assistant_tokens_mask=True
        )
    return list(encoded["input_ids"]), [bool(flag) for flag in encoded["assistant_masks"]]


def _by_prefixes(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    whole = _render(messages, tokenizer, ask=False)
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = _render(messages[:index], tokenizer, ask=True) if index else ""
        after = _render(messages[: index + 1], tokenizer, ask=False)
        if not (after.startswith(before) and whole.startswith(after)):
            raise DataError(
                f"the chat template writes turn {index + 1} differently once later turns follow, so what the "
                "assistant wrote cannot be told",
                where="sft",
                hint="mark it in the template with {% generation %}…{% endgeneration %}",
            )
        spans.append((len(before), len(after)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    learnt = [any(start <= first and last <= end for start, end in spans) for first, last in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), learnt


def _render(messages: Messages, tokenizer: PreTrainedTokenizerBase, *, ask: bool) -> str:
    with _refusals():
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=ask
        )
    return str(text)


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise `DataError` for whatever a template raises: it refuses what the model was not trained on, or overflows."""
    try:
        yield
    except Exception as error:
        reason = first_line(error)
        raise DataError(f"the tokenizer's chat template refuses the messages: {reason}", where="sft") from error


def _last_run(flags: list[bool]) -> list[bool]:
    """Keep only the last run of consecutive True."""
    end = len(flags) - flags[::-1].index(True) if True in flags else 0
    start = end
    while start and flags[start - 1]:
        start -= 1
    return [start <= place < end for place in range(len(flags))]
