"""Environments of this distribution continue from a state as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_environments.config import UserConfig
from rlhf_environments.conversation import Conversation
from rlhf_environments.guess_number import GuessNumber
from rlhf_environments.user import User
from rlhf_environments.user_models import Said


class Counts:
    """A user whose messages depend on everything that it is given."""

    def say(self, messages: Any, *, seed: int, offset: int) -> Said:
        return Said(f"{len(messages)} {seed} {offset}" + (" [END]" if len(messages) > 9 else ""), 3)


def user() -> User:
    return User(UserConfig(url="http://localhost:1/v1", model="m"), Counts())  # type: ignore[arg-type]


@pytest.mark.parametrize("num_steps", range(4))
@pytest.mark.parametrize("make", [GuessNumber, lambda: GuessNumber(shuffle_observations=True), Conversation, user])
def test_a_state_continues(make: Callable[[], Any], num_steps: int) -> None:
    prompt = SimpleNamespace(
        text="",
        messages=None,
        answer="7",
        position=4,
        metadata={"goal": "a refund", "turns": ["a", "b", "c", "d", "e"]},
    )
    task = SimpleNamespace(prompt=prompt, seed=11, sample_seed=12)
    replies = [SimpleNamespace(text=text) for text in ("1", "9", "x", "3", "4", "7")]
    whole = make()
    whole.reset(task)
    for reply in replies[:num_steps]:
        whole.step(reply)
    state = json.loads(json.dumps(whole.state()))
    restored = make()
    restored.restore(task, state)
    rest = [whole.step(reply) for reply in replies[num_steps:]]
    assert [restored.step(reply) for reply in replies[num_steps:]] == rest
    assert getattr(restored, "metrics", {}) == getattr(whole, "metrics", {})
