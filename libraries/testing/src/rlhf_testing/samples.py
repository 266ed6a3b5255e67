"""Samples and groups with numbers that a test can predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhf_core.types import BufferItem, Prompt, Rollout, RolloutGroup

from .rollouts import make_rollout


def make_prompt(
    position: int, text: str = "31>", token_ids: Sequence[int] = (7, 5, 14), answer: object = "13"
) -> Prompt:
    """A prompt as the stream yields it."""
    return Prompt(position=position, text=text, prompt_ids=tuple(token_ids), answer=answer)


def make_item(
    sample_id: int,
    *,
    group_id: int | None = None,
    num_prompt_tokens: int = 3,
    num_actions: int = 4,
    policy_version: int = 0,
    reward: float | None = None,
) -> BufferItem:
    """A sample with tokens and log-probs derived from its id; reward `score` is `reward`, or the id mod 3."""
    import torch

    def row(length: int, first: int) -> torch.Tensor:
        return (torch.arange(length) + first + sample_id) % 10 + 4

    actions = row(num_actions, 5)
    return BufferItem(
        sample_id=sample_id,
        group_id=sample_id if group_id is None else group_id,
        policy_version=policy_version,
        prompt_ids=row(num_prompt_tokens, 1),
        response_ids=actions,
        action_mask=torch.ones(num_actions, dtype=torch.bool),
        action_log_probs=-actions.float() / 10,
        rewards={"score": float(sample_id % 3) if reward is None else reward},
    )


def make_group(position: int, num_samples: int = 1, *, policy_version: int = 0, num_actions: int = 4) -> RolloutGroup:
    """A whole group: samples `position * num_samples` and following."""
    first = position * num_samples
    items = tuple(
        make_item(first + k, group_id=position, policy_version=policy_version, num_actions=num_actions)
        for k in range(num_samples)
    )
    return RolloutGroup(position=position, items=items, rollouts=tuple(_rollout(item) for item in items))


def _rollout(item: BufferItem) -> Rollout:
    made = make_rollout("13", prompt="31>", answer="13", sample_id=item.sample_id)
    return replace(
        made,
        group_id=item.group_id,
        policy_version=item.policy_version,
        prompt_ids=tuple(item.prompt_ids.tolist()),
        completion_ids=tuple(item.response_ids.tolist()),
        logprobs=tuple(item.action_log_probs.tolist()),
    )
