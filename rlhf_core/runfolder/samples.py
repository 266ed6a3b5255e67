"""`samples.jsonl`: one line per training sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from ..types import Rollout, Turn

T = TypeVar("T")
Keep = Literal["all", "none"] | int
"""Samples of an episode to write: all, none, or at most this many, spread over the episode."""


def sample_line(
    rollout: Rollout,
    *,
    episode: int,
    rewards: Mapping[str, float],
    score: float | None,
    plays: bool = False,
    tokens: bool = False,
) -> dict[str, Any]:
    """Return the line of a sample.

    rewards: raw score by name. score: combined score. plays: the sample is an environment's episode, whose turns are
    written. tokens: also write token ids and log-probs.
    """
    line: dict[str, Any] = {
        "sample_id": rollout.sample_id,
        "episode": episode,
        "policy_version": rollout.policy_version,
        "prompt": rollout.prompt,
        "completion": rollout.completion,
        "rewards": dict(rewards),
        "score": score if score is None or math.isfinite(score) else None,
        "finish_reason": rollout.finish_reason,
        "num_tokens": len(rollout.sampled_ids),
    }
    if plays:
        line |= {"branch": rollout.branch, "turns": [_turn(turn) for turn in rollout.turns]}
    if rollout.policy_versions:  # not one version for all tokens
        line["policy_versions"] = rollout.policy_versions
    if tokens:
        ids = rollout.completion_ids  # includes observations between the sampled tokens
        line |= {"prompt_ids": rollout.prompt_ids, "completion_ids": ids, "logprobs": rollout.logprobs}
        line["action_mask"] = rollout.action_mask or (True,) * len(ids)
    return line


def _turn(turn: Turn) -> dict[str, Any]:
    """Return one turn of an episode as JSON values."""
    line: dict[str, Any] = {"role": turn.role, "text": turn.text}
    if turn.role == "policy":
        line["reward"] = turn.reward
    if turn.tool_calls:
        line["tool_calls"] = [
            {"name": call.name, "arguments": dict(call.arguments), **({"error": call.error} if call.error else {})}
            for call in turn.tool_calls
        ]
    return line


def choose(records: Sequence[T], keep: Keep) -> Sequence[T]:
    """Return the samples of an episode to keep. A number selects that many, evenly spread and deterministic.

    Example:
        >>> choose(["a", "b", "c", "d"], 2)
        ['a', 'c']
    """
    if keep == "none":
        return ()
    if keep == "all" or keep >= len(records):
        return records
    return [records[index * len(records) // keep] for index in range(keep)]
