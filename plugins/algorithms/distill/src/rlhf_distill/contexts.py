"""Prompts that a teacher sees in place of the policy's: with a solution, a demonstration or feedback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlhf_core.errors import DataError
from rlhf_core.prompts import PromptEncoder
from rlhf_core.types import Message, Rollout, RolloutGroup

from .teacher_config import ANSWER, DEMONSTRATION, FEEDBACK, PROMPT, TeacherConfig

_SKIPPED = frozenset({DEMONSTRATION, FEEDBACK})
"""Fields without which a sample is not taught, instead of an error."""


class TeacherPrompts:
    """Encodes the prompts of one teacher."""

    def __init__(
        self,
        config: TeacherConfig,
        policy_tokenizer: Any,
        tokenizer: Any,
        *,
        where: str,
        score: Callable[[Mapping[str, float]], float],
    ) -> None:
        """Create the encoder.

        Args:
            config: Options of the teacher.
            policy_tokenizer: Tokenizer of the policy.
            tokenizer: Tokenizer of the teacher, which may be the policy's.
            where: Place of the teacher's options, for errors.
            score: Raw rewards of a sample, by name -> its score.
        """
        self._config = config
        self._names = sorted(config.context_names - {PROMPT})
        self._policy = PromptEncoder(policy_tokenizer)
        self._own = self._policy if tokenizer is policy_tokenizer else PromptEncoder(tokenizer)
        self._where = where
        self._score = score

    def ids(self, rollout: Rollout, group: RolloutGroup) -> tuple[int, ...] | None:
        """Return the ids of the teacher's prompt for a sample, or None if a part of the prompt is missing.

        Args:
            rollout: The sample.
            group: All samples of its prompt, with rewards.

        Raises:
            DataError: The record lacks a key, or the row does not start with the record's prompt alone.
        """
        name = f"{self._where}, prompt {rollout.group_id}"
        original: Any = rollout.prompt if rollout.messages is None else rollout.messages
        if self._encoded(self._policy, original, rollout, name) != tuple(rollout.prompt_ids):
            raise DataError(
                "its row starts with more than the text or messages of its prompt, such as tools",
                where=name,
                hint="remove context and tokenizer of the teacher, or the tools",
            )
        prompt = original
        if self._config.context is not None:
            values = self._values(rollout, group, name)
            if values is None:
                return None
            prompt = self._filled(original, values, name)
        return self._encoded(self._own, prompt, rollout, name)

    @staticmethod
    def _encoded(encoder: PromptEncoder, prompt: Any, rollout: Rollout, name: str) -> tuple[int, ...]:
        return encoder.prompt({"prompt": prompt}, rollout.group_id, name).prompt_ids

    def _values(self, rollout: Rollout, group: RolloutGroup, name: str) -> dict[str, str] | None:
        found: dict[str, str] = {}
        for field in self._names:
            value: Any = None
            if field == DEMONSTRATION:
                value = self._demonstration(rollout, group)
            elif field == FEEDBACK:
                value = "\n".join(turn.text for turn in rollout.turns if turn.role == "environment") or None
            else:
                value = rollout.answer if field == ANSWER else rollout.metadata.get(field)
            if value is None and field in _SKIPPED:
                return None
            if value is None:
                keys = ", ".join(sorted(map(str, rollout.metadata))) or "none"
                problem = f"its record lacks the key {field!r} of the teacher's context (other keys: {keys})"
                raise DataError(problem, where=name, hint="correct context, or add the key to every record")
            found[field] = str(value)
        return found

    def _demonstration(self, rollout: Rollout, group: RolloutGroup) -> str | None:
        """Return the best-scored other answer, the first one of several."""
        scored = {
            other.sample_id: (self._score(item.rewards), other.completion)
            for other, item in zip(group.rollouts, group.items, strict=True)
            if other.sample_id != rollout.sample_id
        }
        best = max(scored.values(), key=lambda each: each[0], default=None)
        return None if best is None or best[0] < self._config.demonstration_score else best[1]

    def _filled(self, prompt: str | tuple[Message, ...], values: Mapping[str, str], name: str) -> Any:
        context = self._config.context
        assert context is not None
        if isinstance(prompt, str):
            return context.format_map({**values, PROMPT: prompt})
        last = prompt[-1]
        if last["role"] != "user" or not isinstance(last["content"], str):
            problem = f"the last message of its chat is not the text of a user but of {last['role']!r}"
            raise DataError(problem, where=name, hint="end the prompt with a user's message, or remove context")
        return (*prompt[:-1], {**last, "content": context.format_map({**values, PROMPT: last["content"]})})
