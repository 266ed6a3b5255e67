"""Groups of real texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rlhf_core.types import BufferItem, Rollout, RolloutGroup
from rlhf_testing.models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def group_of(
    position: int, prompt: str, answers: Sequence[str], scores: Sequence[float], **record: Any
) -> RolloutGroup:
    """A group of answers that ended with EOS. record: keys of the record, with `answer`."""
    prompt_ids = TOKENIZER.encode(prompt)
    rollouts, items = [], []
    for k, (answer, score) in enumerate(zip(answers, scores, strict=True)):
        ids = [*TOKENIZER.encode(answer), TOKENIZER.eos_token_id]
        rollouts.append(
            Rollout(
                sample_id=position * len(answers) + k,
                group_id=position,
                prompt=prompt,
                messages=None,
                prompt_ids=tuple(prompt_ids),
                completion=answer,
                completion_ids=tuple(ids),
                logprobs=(-0.5,) * len(ids),
                answer=record.get("answer"),
                metadata={key: value for key, value in record.items() if key != "answer"},
                policy_version=0,
                finish_reason="stop",
            )
        )
        items.append(
            BufferItem(
                sample_id=rollouts[-1].sample_id,
                group_id=position,
                policy_version=0,
                prompt_ids=torch.tensor(prompt_ids),
                response_ids=torch.tensor(ids),
                action_mask=torch.ones(len(ids), dtype=torch.bool),
                action_log_probs=torch.full((len(ids),), -0.5),
                rewards={"score": score},
            )
        )
    return RolloutGroup(position=position, rollouts=tuple(rollouts), items=tuple(items))


def with_metadata(group: RolloutGroup, **metadata: Any) -> RolloutGroup:
    return replace(group, rollouts=tuple(replace(each, metadata=metadata) for each in group.rollouts))
