"""OPO, MaxRL, the optimal token baseline and the weighted KL: by hand, and against slow float64 loops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core import train
from rlhf_core.episode_view import EpisodeView
from rlhf_core.errors import ConfigError
from rlhf_group.score_norms import SCORE_NORM, squared_score_norm
from rlhf_objective import AdvantageInput, FunctionUse, estimator_columns, kl_estimate
from rlhf_testing.contracts import AdvantageContract
from rlhf_testing.runs import tiny_run


class TestLengthWeighted(AdvantageContract):
    plugin = "length-weighted"


class TestMaxLikelihood(AdvantageContract):
    plugin = "max-likelihood"


class TestOptimalToken(AdvantageContract):
    plugin = "optimal-token"


def estimate(name: str, episode: Any, **options: Any) -> Any:
    return FunctionUse("advantages", {"name": name, **options}).bind(where="test")(episode).tolist()


def scalars(rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int], **more: Any) -> EpisodeView:
    total = torch.tensor(rewards)
    return EpisodeView(
        sample_ids=more.get("sample_ids", torch.arange(len(groups))),
        group_ids=torch.tensor(groups),
        scores=total,
        lengths=torch.tensor(lengths),
        branches=more.get("branches"),
        totals=total,
    )


def test_opo_by_hand() -> None:
    """Baseline (1 * 3 + 0 * 1) / 4; equal scores; one answer alone."""
    episode = scalars([1.0, 0.0, 2.0, 2.0, 5.0], [0, 0, 1, 1, 2], [3, 1, 4, 1, 2])
    assert estimate("length-weighted", episode) == pytest.approx([0.25, -0.75, 0.0, 0.0, 0.0])


def test_max_likelihood_by_hand() -> None:
    """One right of four has 3, as in 1 / p - 1; none right, all right and a negative mean have 0."""
    rewards = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, -2.0, 1.0]
    episode = scalars(rewards, [0, 0, 0, 0, 1, 1, 2, 2, 3, 3], [1] * 10)
    assert estimate("max-likelihood", episode) == pytest.approx([3.0, -1.0, -1.0, -1.0, *[0.0] * 6])


def test_rewards_around_zero_do_not_explode() -> None:
    assert estimate("max-likelihood", scalars([0.5, -0.4999, 0.0], [0, 0, 0], [1] * 3)) == [0.0] * 3


def test_two_branches_of_one_answer_do_not_compare_with_each_other() -> None:
    more = {"sample_ids": torch.tensor([0, 0, 1]), "scores": torch.tensor([2.0, 2.0, 0.0])}
    mask = [[True, True], [True, True], [True, False]]
    rows = rows_of([[0.0, 2.0], [0.0, 2.0], [0.0, 0.0]], mask, [0, 0, 0], torch.ones(3, 2), **more)
    assert [row[1] for row in estimate("optimal-token", rows)] == [2.0, 2.0, 0.0], "the tail has baseline 0"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["length-weighted", "max-likelihood"])
def test_baselines_agree_with_a_slow_reference(name: str, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    groups = sorted(torch.randint(0, 4, (12,), generator=draw).tolist())
    rewards = torch.randint(0, 3, (12,), generator=draw).double().tolist()
    lengths = torch.randint(1, 9, (12,), generator=draw).tolist()
    expected = []
    for group, reward in zip(groups, rewards, strict=True):
        own = [(r, n) for r, n, g in zip(rewards, lengths, groups, strict=True) if g == group]
        mean = sum(r for r, _ in own) / len(own)
        if len({r for r, _ in own}) == 1:
            expected.append(0.0)
        elif name == "max-likelihood":
            expected.append((reward - mean) / mean)
        else:
            expected.append(reward - sum(r * n for r, n in own) / sum(n for _, n in own))
    assert estimate(name, scalars(rewards, groups, lengths)) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_an_episode_of_several_rows_is_one_answer() -> None:
    ids = torch.tensor([0, 0, 1, 2])
    rows = scalars([1.0, 1.0, 0.0, 0.0], [0] * 4, [2, 1, 3, 4], sample_ids=ids, branches=torch.tensor([0, 1, 0, 0]))
    for name in ("length-weighted", "max-likelihood"):
        alone = estimate(name, scalars([1.0, 0.0, 0.0], [0] * 3, [3, 3, 4]))
        assert estimate(name, rows) == pytest.approx([alone[0], *alone])


def rows_of(rewards: Any, mask: Any, groups: Sequence[int], norms: Any, **more: Any) -> AdvantageInput:
    return AdvantageInput(
        torch.as_tensor(rewards).float(),
        torch.as_tensor(mask),
        torch.tensor(groups),
        columns={SCORE_NORM: norms},
        **more,
    )


def test_optimal_token_baseline_by_hand() -> None:
    """Energies 1, 1 + 2 and 3, 3 + 3 of two answers with reward 4 and 0; the third token has no counterpart."""
    rewards = [[0.0, 4.0, 0.0], [0.0, 0.0, 0.0]]
    mask = [[True, True, False], [True, True, True]]
    norms = torch.tensor([[1.0, 2.0, torch.nan], [3.0, 3.0, 1.0]])
    rows = rows_of(rewards, mask, [0, 0], norms)
    baselines = [4.0 * 1 / (1 + 3), 4.0 * 3 / (3 + 6)]
    expected = [[4 - baselines[0], 4 - baselines[1], 0.0], [-baselines[0], -baselines[1], 0.0]]
    assert estimate("optimal-token", rows) == [pytest.approx(row) for row in expected]


def test_a_tail_without_counterpart() -> None:
    rows = rows_of([[1.0, 0.0], [0.0, 3.0]], [[True, False], [True, True]], [7, 7], torch.ones(2, 2))
    assert estimate("optimal-token", rows) == [[-1.0, 0.0], [1.0, 3.0]]
    assert estimate("optimal-token", rows, tail_baseline=True) == [[-1.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize("seed", range(6))
def test_optimal_token_agrees_with_a_slow_reference(seed: int) -> None:
    """Tokens of turns between observations are neighbors."""
    draw = torch.Generator().manual_seed(seed)
    groups = [0, 0, 0, 1, 1, 2]
    mask = torch.rand(6, 7, generator=draw) < 0.7
    rewards, norms = torch.randn(6, 7, generator=draw), torch.rand(6, 7, generator=draw)
    tokens = [[t for t in range(7) if mask[row, t]] for row in range(6)]
    to_go = [[sum(rewards[row, u].item() for u in own[k:]) for k in range(len(own))] for row, own in enumerate(tokens)]
    energy = [
        [sum(norms[row, u].item() for u in own[: k + 1]) for k in range(len(own))] for row, own in enumerate(tokens)
    ]
    expected = torch.zeros(6, 7)
    for row, own in enumerate(tokens):
        for k, t in enumerate(own):
            peers = [p for p in range(6) if groups[p] == groups[row] and len(tokens[p]) > k]
            top = sum(energy[p][k] * to_go[p][k] for p in peers)
            baseline = top / sum(energy[p][k] for p in peers) if len(peers) > 1 else 0.0
            alone = groups.count(groups[row]) == 1
            expected[row, t] = 0.0 if alone else to_go[row][k] - baseline
    found = torch.tensor(estimate("optimal-token", rows_of(rewards, mask, groups, norms)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("support", [None, [[0, 2, 4], [1, 3, -1], [-1, -1, -1]]])
def test_score_norms_are_those_of_autograd(support: list[list[int]] | None) -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    labels = torch.tensor([2, 3, 0])
    kept = None if support is None else torch.tensor(support, dtype=torch.int32)
    expected = []
    for row in range(3):
        ids = list(range(5)) if support is None or max(support[row]) < 0 else [i for i in support[row] if i >= 0]
        log_prob = logits[row, ids].log_softmax(-1)[ids.index(int(labels[row]))]
        (gradient,) = torch.autograd.grad(log_prob, logits)
        expected.append(gradient.square().sum())
    torch.testing.assert_close(squared_score_norm(logits.detach(), labels, kept), torch.stack(expected))


def test_the_estimator_declares_the_column() -> None:
    bound = FunctionUse("advantages", "optimal-token").bind(where="test")
    assert set(estimator_columns(bound)) == {SCORE_NORM}
    assert not estimator_columns(None)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "grpo", "advantage": "optimal-token", "kl_coef": 0},
        {"name": "rloo", "advantage": "length-weighted"},
        {"name": "grpo", "advantage": "max-likelihood", "kl_ratio": True},
        {"name": "ppo", "advantage": "optimal-token", "kl_in": "loss", "kl_estimator": "k3", "kl_ratio": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("top_k", [0, 3])
def test_runs_start(algorithm: dict[str, Any], top_k: int, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "algorithm": algorithm,
        "rewards": [{"name": "length", "target_tokens": 1, "shape": "at-most"}],
        "engine": {"max_new_tokens": 6, "top_k": top_k},
        "train": {"episodes": 2, "prompts_per_episode": 4, "samples_per_prompt": 4, "train_batch_size": 8},
    }
    result = train(tiny_run(changes), output=tmp_path / "run")
    assert result is not None and result.summary["status"] == "done"
    assert any(line["loss/policy"] != 0 for line in result.metrics)


def weighted_gradient(estimator: Any, logits: Tensor, reference: Tensor) -> Tensor:
    """Exact expectation over tokens of the gradient of ratio * KL, where the sampling policy equals the policy."""
    logits = logits.clone().requires_grad_()
    log_probs = logits.log_softmax(-1)
    ratio = (log_probs - log_probs.detach()).exp()
    (log_probs.detach().exp() * ratio * kl_estimate(log_probs, reference, estimator)).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_weighted_kl_has_the_gradient_of_the_kl(estimator: Any) -> None:
    draw = torch.Generator().manual_seed(3)
    logits, other = torch.randn(2, 6, dtype=torch.float64, generator=draw)
    reference = other.log_softmax(-1)
    exact = logits.clone().requires_grad_()
    log_probs = exact.log_softmax(-1)
    (log_probs.exp() * (log_probs - reference)).sum().backward()
    torch.testing.assert_close(weighted_gradient(estimator, logits, reference), exact.grad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_in": "reward"}, "kl_ratio weights the KL in the loss"),
        ({"kl_coef": 0}, "kl_ratio weights the KL, which kl_coef: 0 turns off"),
        ({"kl_estimator": "k2"}, "kl_ratio gives k1 and k3 the gradient of the KL"),
    ],
)
def test_a_weighted_kl_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tiny_run({"algorithm": {"name": "grpo", "kl_ratio": True, **options}}), dry_run=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "rloo"}, r"advantage: max-likelihood needs rewards of at least 0, but kl_in: reward subtracts"),
        ({"name": "grpo", "overlong_buffer_tokens": 2}, r"but overlong_buffer_tokens subtracts"),
    ],
)
def test_penalties_in_a_reward_that_must_not_be_negative_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tiny_run({"algorithm": {"advantage": "max-likelihood", **options}}), dry_run=True)
