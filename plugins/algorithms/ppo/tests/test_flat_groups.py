"""PPO with an estimator that compares the answers of one group is warned if there is nothing to compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf_core import train
from rlhf_core.batching import collate
from rlhf_core.types import BufferItem
from rlhf_ppo.algorithm import PPO
from rlhf_ppo.config import PPOConfig
from rlhf_testing.runs import tiny_run

CONSTANT = "def constant(samples):\n    return [1.0] * len(samples)\n"


@pytest.mark.parametrize(
    ("advantage", "scores", "warns"),
    [
        ("leave-one-out", [3.0, 3.0, 1.0, 1.0], True),
        ("leave-one-out", [3.0, 2.0, 1.0, 1.0], False),
        (None, [3.0, 3.0, 1.0, 1.0], False),
    ],
)
def test_three_episodes_of_equal_scores_in_each_group_warn(
    advantage: str | None,
    scores: list[float],
    warns: bool,
    make_items: Callable[..., list[BufferItem]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    named = {} if advantage is None else {"advantage": advantage}
    ppo = PPO(PPOConfig(kl_coef=0.0, **named))  # type: ignore[arg-type]
    given = replace(
        collate(make_items(4)),
        scores=torch.tensor(scores),
        group_ids=torch.tensor([0, 0, 1, 1]),
        rewards={"score": torch.tensor(scores)},
    )
    for _ in range(3):
        assert "nothing can be learned" not in caplog.text
        ppo.advantages(given)
    assert ("nothing can be learned" in caplog.text) == warns


def test_a_run_with_a_constant_reward_has_the_warning_in_its_log(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CONSTANT)
    run = tiny_run(
        {
            "algorithm": {"advantage": "leave-one-out"},
            "rewards": [{"name": f"{tmp_path / 'mine.py'}:constant"}],
            "train": {"episodes": 3},
        }
    )
    result = train(run, output=tmp_path / "run")
    assert result is not None and result.summary["status"] == "done"
    log = (tmp_path / "run" / "run.log").read_text()
    assert log.count("nothing can be learned from the rewards: constant was always 1") == 1
