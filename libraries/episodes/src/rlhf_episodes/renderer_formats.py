"""Find the format of replies in the package `renderers`, by comparing its texts with those of the chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from rlhf_containment.processes.asked import ProcessFault, RequestProcess
from rlhf_core.errors import ConfigError
from rlhf_core.types import Message, ToolCall

from .contract import Tool
from .response_formats import ResponseFormat
from .response_templates import Family

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTALL = "pip install 'rlhf-episodes[renderers]', which reads calls of MiniMax-M2, Hy3 and Inkling"
Example = tuple[Sequence[Message], Sequence[Tool], str]
"""Messages, tools, and the text that the chat template renders for them, without a generation prompt."""


def recognise_renderer(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], text: str, call: ToolCall
) -> ResponseFormat | None:
    """Return the format of the first renderer that writes all examples and reads `text` as exactly this call, or None.

    None without the package. Names of models are not compared: a fine-tuned model has the format of its chat template.

    Args:
        tokenizer: The policy's tokenizer.
        examples: A conversation without tools, then others with tools, calls, results and a thought.
        text: A reply that the chat template renders for the call.
        call: The call in `text`.

    Raises:
        ConfigError: The process that compares them failed or was too slow.
    """
    try:
        version("renderers")
    except PackageNotFoundError:
        return None
    tokens = sorted(tokenizer.get_added_vocab())
    process = RequestProcess("rlhf_episodes.renderer_parser")
    try:
        name = json.loads(process.start(json.dumps([tokens, tokenizer.eos_token, examples]).encode()))
    except ProcessFault as error:
        raise ConfigError(
            f"the process that compares it with the package renderers {error}",
            where="the tokenizer's chat template",
            hint="pip install -U 'rlhf-episodes[renderers]', or pip uninstall renderers",
        ) from error
    finally:
        process.end()
    if name is None:
        return None
    # A reply without the first marker of a call does not contain a call. Inkling's template writes an empty content
    # before it, whose markers other replies have too.
    tag = min((token for token in tokens if token in text and token not in examples[0][2]), key=text.index, default="")
    reader = {"renderer": name, "tokens": tokens, "eos": tokenizer.eos_token}
    found = ResponseFormat(Family(name=name, tag=tag, end=None, template=reader, in_channels=True))
    return found if found.tools.parse(text) == (call,) else None
