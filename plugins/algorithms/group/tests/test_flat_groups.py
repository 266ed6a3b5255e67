"""A run whose groups all have equal scores is warned that it cannot learn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

FLAT = {"exact-match": [0.0, 0.0, 0.0, 0.0], "brevity": [1.0, 1.0, 1.0, 1.0]}


def run_episodes(
    made: Any, episode: Callable[..., Any], rewards: Mapping[str, Sequence[float]], times: int = 3
) -> None:
    scores = [sum(values) for values in zip(*rewards.values(), strict=True)]
    named = {name: torch.tensor(values) for name, values in rewards.items()}
    for _ in range(times):
        made.advantages(episode(scores, [0, 0, 1, 1], [2, 3, 1, 3], rewards=named))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_three_flat_episodes_warn_once_and_name_the_constant_rewards(
    algorithm: Callable[..., Any], episode: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    made = algorithm("grpo", {"kl_coef": 0})
    run_episodes(made, episode, FLAT, times=2)
    assert warnings_of(caplog) == []
    run_episodes(made, episode, FLAT, times=3)
    [warning] = warnings_of(caplog)
    assert "3 episodes" in warning and "every advantage is 0" in warning
    assert "exact-match was always 0" in warning and "brevity was always 1" in warning


def test_an_episode_with_spread_starts_the_count_again(
    algorithm: Callable[..., Any], episode: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    made = algorithm("rloo", {"kl_coef": 0})
    run_episodes(made, episode, FLAT, times=2)
    run_episodes(made, episode, {"exact-match": [0.0, 1.0, 0.0, 0.0]}, times=1)
    run_episodes(made, episode, FLAT, times=2)
    assert warnings_of(caplog) == []


def test_rewards_that_differ_between_prompts_only_are_named_as_such(
    algorithm: Callable[..., Any], episode: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    run_episodes(algorithm("grpo", {"kl_coef": 0}), episode, {"exact-match": [0.0, 0.0, 1.0, 1.0]})
    [warning] = warnings_of(caplog)
    assert "exact-match was equal for all answers to a prompt (0 to 1)" in warning


def test_an_estimator_whose_baseline_is_the_whole_episode_is_left_alone(
    algorithm: Callable[..., Any], episode: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    run_episodes(algorithm("reinforce++", {"kl_coef": 0}), episode, FLAT)
    assert warnings_of(caplog) == []
