"""Convert whole conversations to examples in which only the assistant's turns are trained."""

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
"""Block in which a chat template marks the assistant's text."""


def conversation_example(messages: Messages, tokenizer: PreTrainedTokenizerBase, *, turns: Turns) -> Example:
    """Render a conversation with the model's chat template, and mask all but its assistant turns, or the last of them.

    If the template marks the assistant's text (`{% generation %}`), those marks are used. Otherwise a turn is the text
    that the template adds for it, including its end-of-turn token.

    Args:
        messages: Messages with `role` and `content`.
        tokenizer: Tokenizer with a chat template.
        turns: Train `all` assistant turns or the `last`.

    Raises:
        DataError: The conversation lacks an assistant turn, or the template is missing, fails, or is ambiguous.
    """
    if not any(message.get("role") == "assistant" for message in messages):
        raise DataError("the conversation lacks an assistant message", where="sft")
    if not tokenizer.chat_template:
        raise DataError(
            "the record is a conversation, but the model's tokenizer lacks a chat template",
            where="sft",
            hint="use a chat model, or write prompt and completion as text",
        )
    if _GENERATION.search(str(tokenizer.chat_template)):
        ids, trained = _encode_marked(messages, tokenizer)
    else:
        ids, trained = _encode_by_prefixes(messages, tokenizer)
    if turns == "last":
        trained = _last_run(trained)
    return Example(torch.tensor(ids, dtype=torch.int64), torch.tensor(trained, dtype=torch.bool))


def _encode_marked(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    with _template_errors():
        encoded: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages], return_dict=True, return_assistant_tokens_mask=True
        )
    return list(encoded["input_ids"]), [bool(flag) for flag in encoded["assistant_masks"]]


def _encode_by_prefixes(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    whole = _render(messages, tokenizer, prompt=False)
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = _render(messages[:index], tokenizer, prompt=True) if index else ""
        after = _render(messages[: index + 1], tokenizer, prompt=False)
        if not (after.startswith(before) and whole.startswith(after)):
            raise DataError(
                f"the chat template renders turn {index + 1} differently if later turns follow, so the "
                "assistant's text cannot be located",
                where="sft",
                hint="mark it in the template with {% generation %}…{% endgeneration %}",
            )
        spans.append((len(before), len(after)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    trained = [any(start <= first and last <= end for start, end in spans) for first, last in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), trained


def _render(messages: Messages, tokenizer: PreTrainedTokenizerBase, *, prompt: bool) -> str:
    with _template_errors():
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=prompt
        )
    return str(text)


@contextmanager
def _template_errors() -> Iterator[None]:
    """Convert any error of a template to `DataError`: templates reject messages that the model was not trained on."""
    try:
        yield
    except Exception as error:
        reason = first_line(error)
        raise DataError(f"the tokenizer's chat template rejects the messages: {reason}", where="sft") from error


def _last_run(flags: list[bool]) -> list[bool]:
    """Keep only the last run of consecutive True values."""
    end = len(flags) - flags[::-1].index(True) if True in flags else 0
    start = end
    while start and flags[start - 1]:
        start -= 1
    return [start <= place < end for place in range(len(flags))]
