"""A run whose groups all have equal scores is warned that it cannot learn."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pytest
import torch

from rlhf_core.episode_view import EpisodeView
from rlhf_objective import FlatGroups, needs

FLAT = {"exact-match": [0.0, 0.0, 0.0, 0.0], "brevity": [1.0, 1.0, 1.0, 1.0]}


@needs("scalars", compares_answers=True)
def of_groups(episode: EpisodeView) -> torch.Tensor:
    raise AssertionError("not called: `see` is given its result")


@needs("scalars")
def of_the_whole_episode(episode: EpisodeView) -> torch.Tensor:
    raise AssertionError("not called: `see` is given its result")


def see(
    groups: FlatGroups,
    rewards: Mapping[str, Sequence[float]],
    times: int = 3,
    *,
    advantage: float = 0.0,
    penalises_kl: bool = False,
) -> None:
    """Episodes of two groups of two answers, whose score is the sum of their rewards."""
    named = {name: torch.tensor(values) for name, values in rewards.items()}
    scores = torch.stack(list(named.values())).sum(0)
    episode = EpisodeView(
        sample_ids=torch.arange(4),
        group_ids=torch.tensor([0, 0, 1, 1]),
        scores=scores,
        lengths=torch.tensor([2, 3, 1, 3]),
        rewards=named,
    )
    for _ in range(times):
        groups.see(episode, torch.full((4, 3), advantage), penalises_kl=penalises_kl)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_three_flat_episodes_warn_once_and_name_the_constant_rewards(caplog: pytest.LogCaptureFixture) -> None:
    groups = FlatGroups(of_groups)
    see(groups, FLAT, times=2)
    assert warnings_of(caplog) == []
    see(groups, FLAT, times=3)
    [warning] = warnings_of(caplog)
    assert "3 episodes" in warning and "every advantage is 0" in warning
    assert "exact-match was always 0" in warning and "brevity was always 1" in warning


def test_an_episode_with_spread_starts_the_count_again(caplog: pytest.LogCaptureFixture) -> None:
    groups = FlatGroups(of_groups)
    see(groups, FLAT, times=2)
    see(groups, {"exact-match": [0.0, 1.0, 0.0, 0.0]}, times=1)
    see(groups, FLAT, times=2)
    assert warnings_of(caplog) == []


def test_rewards_that_differ_between_prompts_only_are_named(caplog: pytest.LogCaptureFixture) -> None:
    see(FlatGroups(of_groups), {"exact-match": [0.0, 0.0, 1.0, 1.0]})
    [warning] = warnings_of(caplog)
    assert "exact-match was 0 to 1" in warning


def test_rewards_that_cancel_each_other_are_named(caplog: pytest.LogCaptureFixture) -> None:
    see(FlatGroups(of_groups), {"right": [0.0, 1.0, 0.0, 1.0], "short": [1.0, 0.0, 1.0, 0.0]})
    [warning] = warnings_of(caplog)
    assert "right was 0 to 1, short was 0 to 1" in warning


def test_advantages_other_than_zero_count_unless_they_come_from_a_kl(caplog: pytest.LogCaptureFixture) -> None:
    see(FlatGroups(of_groups), FLAT, advantage=0.5)
    assert warnings_of(caplog) == []
    see(FlatGroups(of_groups), FLAT, advantage=0.5, penalises_kl=True)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("estimator", [of_the_whole_episode, None])
def test_an_estimator_that_does_not_compare_answers_is_left_alone(
    estimator: object, caplog: pytest.LogCaptureFixture
) -> None:
    see(FlatGroups(estimator), FLAT)  # type: ignore[arg-type]
    assert warnings_of(caplog) == []
