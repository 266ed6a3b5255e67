"""`**generate_kwargs` of `PPOTrainer`; what each option means is tested with `libraries/seed/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlhf_core.types import Rollout
from rlhf_ppo import PPOTrainer


def test_answers_end_with_the_token_that_was_asked_for(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any
) -> None:
    seen: list[Rollout] = []

    def keep(rollouts: Sequence[Rollout]) -> list[float]:
        seen.extend(rollouts)
        return [0.0 for _ in rollouts]

    ends = list(range(4, 10))
    make_trainer(reward_model=keep, eos_token_id=ends, max_new_tokens=24, use_cache=True).fit(1, 2, 1, prompt_loader)
    stopped = [rollout for rollout in seen if rollout.finish_reason == "stop"]
    assert len(seen) == 16 and any(rollout.completion_ids[-1] in ends for rollout in stopped)
    assert not any(set(rollout.completion_ids[:-1]) & set(ends) for rollout in seen)
