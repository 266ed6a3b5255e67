"""Encodes rollouts for a reward model: the policy's tokens, or text in the model's own tokenizer and template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rlhf_core.prompts import PromptEncoder
from rlhf_core.types import Rollout

Encoding = Literal["auto", "tokens", "continuation", "conversation"]


class RolloutEncoder:
    """Token ids of whole samples: prompt and answer.

    `pools_itself` says that the model does not read the last token (BERT and its kin): a text is then tokenized as a
    whole, with the special tokens its tokenizer puts around it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        encoding: Encoding,
        same_tokenizer: bool,
        pools_itself: bool,
        limit_tokens: int,
        cut: bool,
        append_eos: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._encoding = encoding
        self._same_tokenizer = same_tokenizer
        self._pools_itself = pools_itself
        self._limit_tokens = limit_tokens
        self._cut = cut
        self._append_eos = append_eos
        self._prompts = PromptEncoder(tokenizer)

    def encode(self, rollouts: Sequence[Rollout]) -> list[list[int]]:
        """One sequence per sample. Raises `ValueError` naming a sample that cannot be encoded."""
        return [self._within_limit(self._encode(rollout), rollout) for rollout in rollouts]

    def _encode(self, rollout: Rollout) -> list[int]:
        encoding = self._encoding
        if encoding == "auto":
            is_chat = rollout.messages is not None
            encoding = "tokens" if self._same_tokenizer else "conversation" if is_chat else "continuation"
        if encoding == "tokens":
            ids = [*rollout.prompt_ids, *rollout.completion_ids]
            return ids + self._end() if self._append_eos and rollout.finish_reason == "length" else ids
        return self._conversation(rollout) if encoding == "conversation" else self._continuation(rollout)

    def _continuation(self, rollout: Rollout) -> list[int]:
        if self._pools_itself and rollout.messages is None:
            text = rollout.prompt + rollout.completion
            ids = self._tokenizer(text, truncation=self._cut, max_length=self._limit_tokens if self._cut else None)
            return list(ids["input_ids"])
        record = {"prompt": rollout.prompt if rollout.messages is None else list(rollout.messages)}
        prompt = self._prompts.prompt(record, rollout.sample_id, f"sample {rollout.sample_id}")
        answer = self._tokenizer(rollout.completion, add_special_tokens=False)["input_ids"]
        ended = self._append_eos or rollout.finish_reason != "length"
        return [*prompt.prompt_ids, *answer, *(self._end() if ended else [])]

    def _end(self) -> list[int]:
        eos = self._tokenizer.eos_token_id
        return [] if eos is None else [int(eos)]

    def _conversation(self, rollout: Rollout) -> list[int]:
        if rollout.messages is None:
            raise ValueError(
                f"sample {rollout.sample_id} is no chat, so there is no conversation: say encoding: continuation"
            )
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"sample {rollout.sample_id} is a chat, but the reward model's tokenizer has no chat template: "
                "put a chat_template.jinja into its folder, or say encoding: tokens if it shares the policy's tokenizer"
            )
        messages = [*map(dict, rollout.messages), {"role": "assistant", "content": rollout.completion}]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # a template may also recurse or overflow
            raise ValueError(
                f"sample {rollout.sample_id}: the reward model's chat template refuses it: {error}"
            ) from None
        # A chat template writes its special tokens itself.
        return list(self._tokenizer(str(text), add_special_tokens=False)["input_ids"])

    def _within_limit(self, ids: list[int], rollout: Rollout) -> list[int]:
        if not ids:
            raise ValueError(f"sample {rollout.sample_id} has no token to read")
        if len(ids) <= self._limit_tokens:
            return ids
        if not self._cut:
            raise ValueError(
                f"sample {rollout.sample_id} is {len(ids)} tokens long, the reward model reads {self._limit_tokens}: "
                "lower engine.max_new_tokens or prompts.max_prompt_tokens, or say too_long: cut"
            )
        return ids[: self._limit_tokens] if self._pools_itself else ids[-self._limit_tokens :]


def same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether both make the same tokens of every text and render every chat alike."""
    if one.chat_template != other.chat_template or one.eos_token_id != other.eos_token_id:
        return False
    return bool(_tokenization(one) == _tokenization(other))


def _tokenization(tokenizer: PreTrainedTokenizerBase) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return type(tokenizer).__name__, tokenizer.get_vocab()
    described = json.loads(backend.to_str())
    return {key: value for key, value in described.items() if key not in ("padding", "truncation", "version")}
