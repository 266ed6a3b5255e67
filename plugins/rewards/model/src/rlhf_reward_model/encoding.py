"""Encodes rollouts for a reward model, as the policy's tokens or with the model's own tokenizer and chat template."""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from rlhf_core.prompts import PromptEncoder
from rlhf_core.types import Rollout

from .config import ModelRewardConfig


class EncodedSample(NamedTuple):
    """Token ids, and the positions at which scores are read."""

    ids: list[int]
    positions: list[int]


@dataclass
class RolloutEncoder:
    """Encodes prompt and answer of samples, with the score read at the last token."""

    tokenizer: PreTrainedTokenizerBase
    config: ModelRewardConfig
    _: KW_ONLY
    same_tokenizer: bool
    """Whether the policy has the same tokenizer."""
    limit_tokens: int
    """Maximum length of a sample."""
    pools_itself: bool = False
    """Whether the model has its own pooling instead of reading the last token (BERT and similar). A text is then
    tokenized as a whole, with the special tokens that its tokenizer adds.
    """

    def __post_init__(self) -> None:
        self._cut = self.config.too_long == "cut"
        self._prompts = PromptEncoder(self.tokenizer)

    def encode(self, rollout: Rollout) -> EncodedSample:
        """Encode a sample. Raises `ValueError`, which names the sample, if that is not possible."""
        ids = self._encode(rollout)
        if not ids:
            raise ValueError(f"sample {rollout.sample_id} is empty: it does not have any tokens")
        if self._cut:
            ids = ids[: self.limit_tokens] if self.pools_itself else ids[-self.limit_tokens :]
        self.check_length(ids, rollout, ", or set too_long: cut")
        return EncodedSample(ids, [len(ids) - 1])

    def check_length(self, ids: list[int], rollout: Rollout, advice: str = "") -> None:
        """Raise `ValueError` if there are more tokens than the model reads."""
        if len(ids) > self.limit_tokens:
            raise ValueError(
                f"sample {rollout.sample_id} is {len(ids)} tokens long, the reward model reads {self.limit_tokens}: "
                f"lower engine.max_new_tokens or prompts.max_prompt_tokens{advice}"
            )

    def prompt_ids(self, rollout: Rollout) -> list[int]:
        """Encode the prompt with the model's own tokenizer, and a chat with its own template."""
        record = {"prompt": rollout.prompt if rollout.messages is None else list(rollout.messages)}
        return list(self._prompts.prompt(record, rollout.sample_id, f"sample {rollout.sample_id}").prompt_ids)

    def _encode(self, rollout: Rollout) -> list[int]:
        encoding = self.config.encoding
        if encoding == "auto":
            is_chat = rollout.messages is not None
            encoding = "tokens" if self.same_tokenizer else "conversation" if is_chat else "continuation"
        if encoding == "tokens":
            ids = [*rollout.prompt_ids, *rollout.completion_ids]
            return ids + self._eos_ids() if self.config.append_eos and rollout.finish_reason == "length" else ids
        return self._conversation(rollout) if encoding == "conversation" else self._continuation(rollout)

    def _continuation(self, rollout: Rollout) -> list[int]:
        if self.pools_itself and rollout.messages is None:
            text = rollout.prompt + rollout.completion
            ids = self.tokenizer(text, truncation=self._cut, max_length=self.limit_tokens if self._cut else None)
            return list(ids["input_ids"])
        answer = self.tokenizer(rollout.completion, add_special_tokens=False)["input_ids"]
        has_eos = self.config.append_eos or rollout.finish_reason != "length"
        return [*self.prompt_ids(rollout), *answer, *(self._eos_ids() if has_eos else [])]

    def _eos_ids(self) -> list[int]:
        eos = self.tokenizer.eos_token_id
        return [] if eos is None else [int(eos)]

    def _conversation(self, rollout: Rollout) -> list[int]:
        if rollout.messages is None:
            raise ValueError(
                f"sample {rollout.sample_id} is not a chat, so it cannot be a conversation: set encoding: continuation"
            )
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"sample {rollout.sample_id} is a chat, but the reward model's tokenizer lacks a chat template: "
                "put a chat_template.jinja into its folder, or set encoding: tokens if it shares the policy's tokenizer"
            )
        messages = [*map(dict, rollout.messages), {"role": "assistant", "content": rollout.completion}]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # a template may also recurse or overflow
            raise ValueError(
                f"sample {rollout.sample_id}: the reward model's chat template refuses it: {error}"
            ) from None
        # The chat template has already added the special tokens.
        return list(self.tokenizer(str(text), add_special_tokens=False)["input_ids"])


def same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether both tokenize every text and render every chat identically."""
    if one.chat_template != other.chat_template or one.eos_token_id != other.eos_token_id:
        return False
    return bool(_tokenization(one) == _tokenization(other))


def _tokenization(tokenizer: PreTrainedTokenizerBase) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return type(tokenizer).__name__, tokenizer.get_vocab()
    settings = json.loads(backend.to_str())
    return {key: value for key, value in settings.items() if key not in ("padding", "truncation", "version")}
