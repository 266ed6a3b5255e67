"""Handmade rollouts for testing a reward: `make_rollout("the answer")`, and a set of awkward answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.types import FinishReason, Message, Rollout

EOS_ID = 2


def make_rollout(
    completion: str,
    *,
    prompt: str = "Say something.",
    answer: Any = None,
    metadata: Mapping[str, Any] | None = None,
    messages: Sequence[Message] | None = None,
    completion_ids: Sequence[int] | None = None,
    finish_reason: FinishReason = "stop",
    sample_id: int = 0,
) -> Rollout:
    """Create a rollout as a reward receives it.

    Args:
        completion: Text of the answer.
        prompt: Text of the prompt.
        answer: Reference answer of the record.
        metadata: Other values of the record.
        messages: Chat messages of the prompt.
        completion_ids: Token ids. None is one token per character, plus EOS if `finish_reason` is `stop`.
        finish_reason: `stop` or `length`.
        sample_id: Sample id and group id.

    Returns:
        A rollout of policy version 0 with log-probs of -0.5.

    Example:
        >>> rollout = make_rollout("4", answer="4")
        >>> rollout.completion, rollout.completion_ids
        ('4', (55, 2))
    """
    ids = tuple(completion_ids) if completion_ids is not None else tuple(3 + ord(c) for c in completion)
    if completion_ids is None and finish_reason == "stop":
        ids = (*ids, EOS_ID)
    return Rollout(
        sample_id=sample_id,
        group_id=sample_id,
        prompt=prompt,
        messages=None if messages is None else tuple(messages),
        prompt_ids=tuple(3 + ord(character) for character in prompt),
        completion=completion,
        completion_ids=ids,
        logprobs=(-0.5,) * len(ids),
        answer=answer,
        metadata={} if metadata is None else metadata,
        policy_version=0,
        finish_reason=finish_reason,
    )


def awkward_rollouts() -> list[Rollout]:
    """Difficult answers that policies do write: empty, truncated, other alphabets, markup, noise.

    Returns:
        Eight rollouts with sample ids 0 to 7.
    """
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"})
    return [
        make_rollout("4", prompt="2 + 2 = ", answer="4", sample_id=0),
        make_rollout("", answer="4", sample_id=1),
        make_rollout("five, I think, or rather", answer="4", finish_reason="length", sample_id=2),
        make_rollout("<answer> 4 </answer>\n", messages=chat, prompt="2 + 2?", answer="4", sample_id=3),
        make_rollout("答案是四 — \U0001f600\x00\u202e", answer="四", sample_id=4),
        make_rollout("la " * 400, answer="la", sample_id=5),
        make_rollout('{"answer": [4, null, 1e999]', answer="4", metadata={"source": "test"}, sample_id=6),
        make_rollout("4", prompt="2 + 2 = ", answer="4", sample_id=7),
    ]
