"""Runs whose advantages credit turns, with branches.

That Ray and two processes train as one is held by `test_environments.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from environment_runs import GAMES
from run_files import metrics, start

pytestmark = pytest.mark.usefixtures("no_plots")


def trained(folder: Path, advantage: Any, *, episodes: int = 3, environment: Any = None, **changes: Any) -> list[Any]:
    run = {
        "prompts": {"name": "tasks"},
        "environment": environment or {"name": f"{GAMES}:Branches", "max_turns": 5},
        "algorithm": {"name": "grpo", "advantage": advantage, "turn_gamma": 0.9, "kl_coef": 0.1, "kl_in": "reward"},
        "engine": {"max_new_tokens": 4},
        "rewards": None,
        "train": {"episodes": episodes, "prompts_per_episode": 4, "samples_per_prompt": 4, "train_batch_size": 16},
        **changes,
    }
    return metrics(start(run, folder).run_folder)


@pytest.mark.parametrize("advantage", ["turn-normalised", "turn-to-go", {"name": "gigpo", "state": "history"}], ids=str)
@pytest.mark.slow
def test_it_trains_with_branches(advantage: Any, tmp_path: Path) -> None:
    for line in trained(tmp_path / "run", advantage):
        assert line["policy/grad_norm"] > 0


def test_a_turn_is_credited_not_the_episode(tmp_path: Path) -> None:
    """Same samples in the first episode, another gradient."""
    by_turn = trained(tmp_path / "turn", "turn-normalised", episodes=1)
    run = {"algorithm": {"name": "grpo", "kl_coef": 0.1, "kl_in": "reward"}}
    whole = trained(tmp_path / "whole", None, episodes=1, **run)
    assert by_turn[0]["reward/mean"] == whole[0]["reward/mean"]
    assert by_turn[0]["policy/grad_norm"] != pytest.approx(whole[0]["policy/grad_norm"], rel=1e-3)
