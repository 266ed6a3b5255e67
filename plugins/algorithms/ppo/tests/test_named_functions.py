"""PPO with functions chosen by name, and with what it shares with the critic-free algorithms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.batching import collate
from rlhf_core.columns import Column, Columns
from rlhf_core.episode_view import EpisodeView
from rlhf_core.types import BufferItem, Experience
from rlhf_ppo.algorithm import PPO
from rlhf_ppo.config import PPOConfig

FUNCTIONS = """
import torch
SEEN = []

def seen(rows):
    SEEN.append(rows)
    return torch.where(rows.mask, rows.values + rows.named_rewards["score"][:, None], 0.0)

def squared(log_probs, reference_log_probs, *, factor: float = 1.0):
    return factor * (log_probs - reference_log_probs) ** 2
"""


def episode(make_items: Callable[..., list[BufferItem]], **changes: Any) -> Experience:
    batch = collate(make_items(4))
    return replace(batch, scores=torch.tensor([3.0, 0.0, 1.0, 2.0]), **changes)


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return str(tmp_path / "mine.py")


def test_the_critic_has_a_lambda_of_its_own() -> None:
    """Values 1/2 and 1/4, reward 1 at the end: with lambda 0 the policy sees one step, the critic the whole."""
    item = BufferItem(
        sample_id=0,
        group_id=0,
        policy_version=0,
        prompt_ids=torch.tensor([5]),
        response_ids=torch.tensor([6, 7]),
        action_mask=torch.ones(2, dtype=torch.bool),
        action_log_probs=torch.zeros(2),
        values=torch.tensor([0.5, 0.25]),
        score=1.0,
    )
    options: dict[str, Any] = {"kl_coef": 0.0, "whiten_advantages": False, "lam": 0.0}
    output = PPO(PPOConfig(**options, critic_lam=1.0)).advantages(collate([item]))
    assert output.advantages.tolist() == [[0.25 - 0.5, 1.0 - 0.25]]
    assert output.returns.tolist() == [[1.0, 1.0]]
    alike = PPO(PPOConfig(**options)).advantages(collate([item]))
    assert alike.returns.tolist() == [[0.25, 1.0]]


def test_an_estimator_gets_values_log_probs_rewards_and_turns(
    make_items: Callable[..., list[BufferItem]], file: str
) -> None:
    options: dict[str, Any] = {"advantage": f"{file}:seen", "whiten_advantages": False, "kl_coef": 0.1}
    given = episode(make_items, rewards={"score": torch.tensor([3.0, 0.0, 1.0, 2.0])})
    turns = torch.zeros_like(given.action_log_probs).unsqueeze(-1)
    given = replace(given, columns=Columns({"turn_rewards": turns}, {"turn_rewards": Column()}))
    ppo = PPO(PPOConfig(**options))
    found = ppo.advantages(given)
    expected = torch.where(given.action_mask, given.values + given.scores[:, None], 0.0)
    torch.testing.assert_close(found.advantages, expected)
    (rows,) = ppo.estimator.__wrapped__.__globals__["SEEN"]  # type: ignore[union-attr]
    assert torch.equal(rows.log_probs, given.action_log_probs)
    assert torch.equal(rows.reference_log_probs, given.reference_log_probs)
    assert rows.turn_ids.tolist() == [[0 if real else -1 for real in row] for row in given.action_mask.tolist()]
    assert found.returns is not None and not torch.equal(found.returns, found.advantages), "GAE's, for the critic"


def test_an_estimator_of_scalars_is_one_of_ppo_too(make_items: Callable[..., list[BufferItem]]) -> None:
    """One group of four: 3, 0, 1 and 2 less the mean of the others."""
    given = episode(make_items, group_ids=torch.zeros(4, dtype=torch.int64))
    ppo = PPO(PPOConfig(advantage="leave-one-out", whiten_advantages=False, kl_coef=0.0))
    assert not ppo.needs_all_rows
    found = ppo.advantages(given)
    for row, value in enumerate((2.0, -2.0, -2 / 3, 2 / 3)):
        assert found.advantages[row][given.action_mask[row]].tolist() == pytest.approx(
            [value] * int(given.action_mask[row].sum()), abs=1e-6
        )


def test_a_kl_of_a_file_is_penalised(make_items: Callable[..., list[BufferItem]], file: str) -> None:
    given = episode(make_items)
    kl = {"name": f"{file}:squared", "factor": 3.0}
    metrics = PPO(PPOConfig(kl_estimator=kl, kl_coef=0.1)).advantages(given).metrics
    gaps = (given.action_log_probs - given.reference_log_probs)[given.action_mask]
    assert metrics["kl/mean"] == pytest.approx(float((3.0 * gaps.square()).mean()), rel=1e-5)


def test_truncated_and_off_policy_answers_are_masked(make_items: Callable[..., list[BufferItem]]) -> None:
    """Ratios of 4 in the second answer; the third was cut."""
    given = episode(make_items)
    trainer = given.action_log_probs.clone()
    trainer[1] += math.log(4.0)
    given = replace(given, trainer_log_probs=trainer, truncated=torch.tensor([False, False, True, False]))
    ppo = PPO(PPOConfig(importance_outlier_range=(0.5, 2.0), mask_truncated=True, kl_coef=0.0))
    assert ppo.needs_trainer_log_probs
    output = ppo.advantages(given)
    kept = output.action_mask
    assert torch.equal(kept[[0, 3]], given.action_mask[[0, 3]]) and not kept[[1, 2]].any()
    masked = float(given.action_mask[1].sum()) / float(given.action_mask.sum())
    assert output.metrics["off_policy/masked_fraction"] == pytest.approx(masked)
    counts = ppo.counts(output)
    assert counts["policy"] == counts["value"] == float(kept.sum()), "the critic learns from what the policy does"


def test_the_entropy_bonus_is_steered_and_kept(make_items: Callable[..., list[BufferItem]]) -> None:
    options: dict[str, Any] = {"entropy_target": 50.0, "entropy_coef": 0.25, "entropy_coef_step": 0.125, "kl_coef": 0.0}
    ppo = PPO(PPOConfig(**options))
    assert ppo.terms["entropy"].coefficient == 0.0, "nothing has been measured"
    given = episode(make_items)
    metrics = ppo.advantages(given).metrics
    assert metrics["policy/sampled_entropy"] == pytest.approx(-float(given.action_log_probs[given.action_mask].mean()))
    assert ppo.terms["entropy"].coefficient == -0.25
    ppo.end_episode()
    again = PPO(PPOConfig(**options))
    again.load_state_dict(ppo.state_dict())
    again.advantages(given)
    assert again.terms["entropy"].coefficient == -0.375
    again.load_state_dict({"kl_controller": {}})  # of a checkpoint from before


def test_what_a_function_returns_is_checked(make_items: Callable[..., list[BufferItem]]) -> None:
    def flat(episode: EpisodeView) -> Tensor:
        return torch.zeros(2)

    ppo = PPO(PPOConfig(kl_coef=0.0))
    ppo.estimator = flat
    with pytest.raises(TypeError, match=r"the advantage estimator returned \(2,\)"):
        ppo.advantages(episode(make_items))
