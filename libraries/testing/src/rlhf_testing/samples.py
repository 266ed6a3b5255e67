"""Samples and groups with predictable numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhf_core.types import BufferItem, Prompt, Rollout, RolloutGroup

from .rollouts import make_rollout


def make_prompt(
    position: int, text: str = "31>", token_ids: Sequence[int] = (7, 5, 14), answer: object = "13"
) -> Prompt:
    """Create a prompt as the stream yields it.

    Args:
        position: Position in the run's order.
        text: Text of the prompt.
        token_ids: Token ids of the prompt.
        answer: Reference answer.

    Returns:
        The prompt.
    """
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
    """Create a sample with tokens and log-probs derived from its id.

    Args:
        sample_id: Sample id.
        group_id: Group id. None is the sample id.
        num_prompt_tokens: Length of the prompt.
        num_actions: Length of the response.
        policy_version: Version that sampled it.
        reward: Value of the reward `score`. None is the sample id mod 3.

    Returns:
        A sample whose mask is True everywhere.

    Example:
        >>> item = make_item(7, num_actions=3)
        >>> item.response_ids, item.rewards
        (tensor([6, 7, 8]), {'score': 1.0})
    """
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
    """Create a complete group of samples.

    Args:
        position: Position of the prompt, and group id.
        num_samples: Number of samples, with ids from `position * num_samples`.
        policy_version: Version that sampled them.
        num_actions: Length of each response.

    Returns:
        Group with items and rollouts.
    """
    first = position * num_samples
    items = tuple(
        make_item(first + k, group_id=position, policy_version=policy_version, num_actions=num_actions)
        for k in range(num_samples)
    )
    return RolloutGroup(position=position, items=items, rollouts=tuple(rollout_of(item) for item in items))


def rollout_of(item: BufferItem) -> Rollout:
    """Create the rollout of a sample, with its ids.

    Args:
        item: The sample.

    Returns:
        The rollout.
    """
    rollout = make_rollout("13", prompt="31>", answer="13", sample_id=item.sample_id)
    return replace(
        rollout,
        group_id=item.group_id,
        policy_version=item.policy_version,
        prompt_ids=tuple(item.prompt_ids.tolist()),
        completion_ids=tuple(item.response_ids.tolist()),
        logprobs=tuple(item.action_log_probs.tolist()),
    )
