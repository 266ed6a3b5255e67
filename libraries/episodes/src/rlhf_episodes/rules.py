"""Settings that the episodes of an environment share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhf_core.columns import Column
from rlhf_core.prompts.stream import PromptEncoder
from rlhf_core.types import SamplingParams

from .answer_options import AnswerStructures
from .chat import ChatFormat, chat_format
from .section import EnvironmentConfig
from .sight import Sight

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Settings shared by the episodes of a run."""

    options: EnvironmentConfig
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingParams
    context_tokens: int | None
    """Maximum length of a sequence, or None if unlimited."""
    eos_token_ids: frozenset[int]
    """Tokens at which the engine ends a turn."""
    structures: AnswerStructures
    """Structures of answers to calls at an endpoint."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Columns that the environment declares."""
    sight: Sight | None = None
    """Reads images in observations. None if the model does not see."""
    encoder: PromptEncoder = field(init=False)
    """Shared encoder of prompts, so that each prompt is encoded once."""
    chat: ChatFormat = field(init=False)

    def __post_init__(self) -> None:
        """Create the encoder and the chat format. Raises the errors of `chat_format`."""
        object.__setattr__(self, "encoder", PromptEncoder(self.tokenizer))
        chat = chat_format(
            self.tokenizer,
            tool_format=self.options.tool_format,
            history=self.options.history,
            eos_token_ids=self.eos_token_ids,
        )
        object.__setattr__(self, "chat", chat)
