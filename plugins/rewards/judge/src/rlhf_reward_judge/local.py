"""A judge in this process, which generates with an engine as the policy does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.components import RewardContext
from rlhf_core.config import ModelConfig
from rlhf_core.errors import UserInputError
from rlhf_core.models import model_kind_of
from rlhf_core.prompts import PromptEncoder
from rlhf_core.types import GenerationRequest, SamplingParams
from rlhf_models import open_engine

from .config import JudgeConfig
from .remote import JudgeError, JudgeReply
from .verdicts import Messages

WHERE = 'reward "judge": model_path'


class LocalJudge:
    """A judge that is a local model."""

    def __init__(self, config: JudgeConfig, context: RewardContext) -> None:
        """Load the model. Raises `UserInputError` if that fails."""
        assert config.model_path is not None
        model = ModelConfig(path=config.model_path, device=context.device)
        try:
            self._engine, self._tokenizer, policy = open_engine(
                model, config.engine, context.seed, options=config.engine_options
            )
        except UserInputError as error:
            raise UserInputError(error.message, where=WHERE, hint=error.hint) from error
        kind = model_kind_of(policy)
        if config.images and not any(column.model_input for column in kind.columns.values()):
            problem, hint = "images is set, but this model does not see", "set images: false, or use a model that sees"
            raise UserInputError(problem, where=WHERE, hint=hint)
        self._encoder = PromptEncoder(self._tokenizer, kind=kind)
        self._sampling = SamplingParams(
            max_new_tokens=config.max_reply_tokens,
            temperature=config.temperature or 1.0,
            greedy=config.temperature == 0,
        )
        self._num_requests = 0

    async def ask(self, questions: Sequence[Messages]) -> list[JudgeReply | Exception]:
        """Return a reply to each question, or the error of a failed one."""
        return await asyncio.to_thread(self._generate, questions)

    async def aclose(self) -> None:
        """Free the engine."""
        self._engine.close()

    def _generate(self, questions: Sequence[Messages]) -> list[JudgeReply | Exception]:
        replies: dict[int, JudgeReply | Exception] = {}
        sent: dict[int, tuple[int, GenerationRequest]] = {}
        limit = self._engine.context_tokens
        for index, messages in enumerate(questions):
            prompt = self._encoder.prompt(self._record(messages), 0, WHERE)
            prompt_ids, inputs = prompt.prompt_ids, prompt.columns.model_inputs
            if limit is not None and len(prompt_ids) >= limit:
                replies[index] = JudgeError(f"the question is {len(prompt_ids)} tokens long, the judge reads {limit}")
                continue
            request = GenerationRequest(sample_id=self._num_requests, prompt_ids=prompt_ids, inputs=inputs)
            sent[self._num_requests] = index, request
            self._num_requests += 1
        for completion in self._engine.generate([each for _, each in sent.values()], self._sampling) if sent else ():
            index, request = sent[completion.sample_id]
            text = self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
            replies[index] = JudgeReply(str(text), len(request.prompt_ids) + len(completion.token_ids))
        return [replies[index] for index in range(len(questions))]

    def _record(self, messages: Messages) -> Mapping[str, Any]:
        """Return the question as a record of a prompt source."""
        record: dict[str, Any] = {"prompt": self._prompt(messages)}
        if isinstance(messages[-1]["content"], str):
            return record
        from rlhf_images import ImageLimits, ImageReader, read_images

        return read_images(record, ImageReader(ImageLimits(), Path()))

    def _prompt(self, messages: Messages) -> str | Messages:
        """Return the chat messages, or one text if the model lacks a chat template."""
        if self._tokenizer.chat_template:
            return messages
        return "\n\n".join(message["content"] for message in messages) + "\n\n"
