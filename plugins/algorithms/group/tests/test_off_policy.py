"""Importance weights and masks over an episode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

LENGTHS = [2, 2, 1, 3]
RATIOS = [[1.0, 4.0, 1.0], [0.25, 1.0, 1.0], [1.5, 1.0, 1.0], [1.0, 1.0, 0.1]]
"""trainer / engine; beyond a row's length they are padding."""


def run(algorithm: Callable[..., Any], episode: Callable[..., Any], **options: Any) -> Any:
    made = algorithm("rloo", {"kl_coef": 0, **options})
    assert made.needs_trainer_log_probs
    trainer = torch.tensor(RATIOS).log()
    return made.advantages(episode([1.0, 0.0, 3.0, 1.0], [0, 0, 1, 1], LENGTHS, trainer_log_probs=trainer))


def test_nothing_is_asked_of_the_trainer_by_default(algorithm: Callable[..., Any]) -> None:
    assert not any(algorithm(name).needs_trainer_log_probs for name in ("grpo", "rloo", "reinforce++"))


def test_truncated_weights_of_tokens(algorithm: Callable[..., Any], episode: Callable[..., Any]) -> None:
    output = run(algorithm, episode, importance_cap=2.0)
    expected = torch.tensor([[1.0, 2.0, 0.0], [-0.25, -1.0, 0.0], [3.0, 0.0, 0.0], [-2.0, -2.0, -0.2]])
    torch.testing.assert_close(output.advantages, expected)
    weights = [1.0, 2.0, 0.25, 1.0, 1.5, 1.0, 1.0, 0.1]
    size = sum(weights) ** 2 / (8 * sum(w * w for w in weights))
    assert output.metrics["off_policy/effective_sample_size"] == pytest.approx(size, rel=1e-5)
    assert output.metrics["off_policy/weight_mean"] == pytest.approx(sum(weights) / 8, rel=1e-5)
    assert output.metrics["off_policy/truncated_fraction"] == pytest.approx(1 / 8)
    assert output.metrics["off_policy/masked_fraction"] == 0.0
    assert output.metrics["off_policy/ratio_max"] == pytest.approx(4.0)


def test_truncated_weights_of_answers(algorithm: Callable[..., Any], episode: Callable[..., Any]) -> None:
    """Products 4 (cut to 2), 1/4, 3/2 and 1/10, on every token of the answer."""
    output = run(algorithm, episode, importance_cap=2.0, importance_level="sequence")
    expected = torch.tensor([[2.0, 2.0, 0.0], [-0.25, -0.25, 0.0], [3.0, 0.0, 0.0], [-0.2, -0.2, -0.2]])
    torch.testing.assert_close(output.advantages, expected)
    assert output.metrics["off_policy/truncated_fraction"] == pytest.approx(2 / 8)


def test_far_tokens_are_masked(algorithm: Callable[..., Any], episode: Callable[..., Any]) -> None:
    """IcePop: what is kept weighs its ratio; the advantages are 1, -1, 2 and -2."""
    output = run(algorithm, episode, importance_token_range=[0.5, 2.0])
    kept = [[True, False, False], [False, True, False], [True, False, False], [True, True, False]]
    assert output.action_mask.tolist() == kept
    assert output.metrics["off_policy/masked_fraction"] == pytest.approx(3 / 8)
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [3.0, 0.0, 0.0], [-2.0, -2.0, 0.0]])
    torch.testing.assert_close(output.advantages, expected)
    weights = [1.0, 1.0, 1.5, 1.0, 1.0]
    size = sum(weights) ** 2 / (5 * sum(w * w for w in weights))
    assert output.metrics["off_policy/effective_sample_size"] == pytest.approx(size)
    assert output.metrics["off_policy/weight_mean"] == pytest.approx(5.5 / 5)
    assert output.metrics["off_policy/truncated_fraction"] == 0.0


def test_far_answers_are_masked(algorithm: Callable[..., Any], episode: Callable[..., Any]) -> None:
    """Geometric means 2, 1/2, 3/2 and 10^(-1/3) = 0.46."""
    output = run(algorithm, episode, importance_sequence_range=[0.48, 1.9])
    assert output.action_mask.sum(-1).tolist() == [0, 2, 1, 0]
    assert math.isclose(output.metrics["off_policy/masked_fraction"], 5 / 8, rel_tol=1e-6)


def test_an_episode_all_far_off_teaches_nothing(algorithm: Callable[..., Any], episode: Callable[..., Any]) -> None:
    output = run(algorithm, episode, importance_sequence_range=[50.0, 60.0], importance_cap=2.0)
    assert not output.action_mask.any() and not output.advantages.any()
    assert output.metrics["off_policy/effective_sample_size"] == 0.0
