"""A run whose groups all have equal scores is warned that it cannot learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.mark.parametrize(
    ("name", "scores", "warns"),
    [
        ("grpo", [0.0, 0.0, 1.0, 1.0], True),
        ("rloo", [0.0, 0.0, 1.0, 1.0], True),
        ("grpo", [0.0, 1.0, 1.0, 1.0], False),
        ("reinforce++", [0.0, 0.0, 1.0, 1.0], False),
    ],
)
def test_three_episodes_of_equal_scores_in_each_group_warn(
    name: str,
    scores: list[float],
    warns: bool,
    algorithm: Callable[..., Any],
    episode: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = algorithm(name, {"kl_coef": 0})
    for _ in range(3):
        assert "nothing can be learned" not in caplog.text
        made.advantages(episode(scores, [0, 0, 1, 1], [2, 3, 1, 3], rewards={"score": torch.tensor(scores)}))
    assert ("nothing can be learned" in caplog.text) == warns
