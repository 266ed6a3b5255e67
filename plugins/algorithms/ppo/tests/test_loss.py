"""PPO.loss: by hand, and against plain float64 Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlhf_core.algorithm import Mean
from rlhf_core.batching import collate
from rlhf_core.types import BufferItem, Experience
from rlhf_ppo.algorithm import PPO
from rlhf_ppo.config import PPOConfig

VOCABULARY = 16


class Given(nn.Module):
    """A policy or critic whose outputs are its parameters: for each row, by place among the row's own tokens."""

    def __init__(self, outputs: Tensor, *, wrap: bool) -> None:
        super().__init__()
        self.outputs = nn.Parameter(outputs)
        self._wrap = wrap

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
        outputs = self.outputs[torch.arange(len(position_ids))[:, None], position_ids]
        return SimpleNamespace(logits=outputs) if self._wrap else outputs


def one_token(ratio: float, advantage: float, **changes: Any) -> tuple[Experience, dict[str, nn.Module]]:
    """A sample of one action whose importance ratio is `ratio`, and the models that say so."""
    new = math.log(0.25)
    item = BufferItem(
        sample_id=0,
        group_id=0,
        policy_version=0,
        prompt_ids=torch.tensor([1]),
        response_ids=torch.tensor([2]),
        action_mask=torch.tensor([True]),
        action_log_probs=torch.tensor([new - math.log(ratio)]),
        advantages=torch.tensor([advantage]),
        values=torch.tensor([changes.pop("old_value", 0.0)]),
        returns=torch.tensor([changes.pop("target", 0.0)]),
        reference_log_probs=torch.tensor([changes.pop("reference", new)]),
    )
    values = torch.tensor([[changes.pop("value", 0.0), 99.0]])
    assert not changes
    models = {"policy": Given(torch.zeros(1, 2, 4), wrap=True), "critic": Given(values, wrap=False)}
    return collate([item]), models


def term(name: str, batch: Experience, models: Mapping[str, nn.Module], **options: Any) -> float:
    return float(PPO(PPOConfig(**options)).loss(models, batch).sums[name].detach())


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -2.4),  # a good action may gain up to 1.2
        (0.5, 2.0, -1.0),  # and loses without bound
        (1.5, -2.0, 3.0),  # a bad one is held back without bound
        (0.5, -2.0, 1.6),  # and gains down to 0.8
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, expected: float) -> None:
    assert term("policy", *one_token(ratio, advantage)) == pytest.approx(expected, rel=1e-6)


def test_asymmetric_clip() -> None:
    options = {"clip_eps": 0.1, "clip_eps_high": 0.4}
    assert term("policy", *one_token(2.0, 1.0), **options) == pytest.approx(-1.4, rel=1e-6)
    assert term("policy", *one_token(0.5, -1.0), **options) == pytest.approx(0.9, rel=1e-6)


def test_dual_clip_bounds_bad_actions_and_is_counted() -> None:
    batch, models = one_token(10.0, -1.0)
    assert term("policy", batch, models) == pytest.approx(10.0, rel=1e-5)
    output = PPO(PPOConfig(dual_clip=3.0)).loss(models, batch)
    assert float(output.sums["policy"].detach()) == pytest.approx(3.0, rel=1e-6)
    assert output.metrics["policy/dual_clip_fraction"] == Mean(torch.tensor(1), torch.tensor(1))
    assert term("policy", *one_token(10.0, 1.0), dual_clip=3.0) == pytest.approx(-1.2, rel=1e-6)


def test_the_ratio_is_not_cut_at_ten() -> None:
    assert term("policy", *one_token(50.0, -1.0)) == pytest.approx(50.0, rel=1e-5)


@pytest.mark.parametrize(
    ("value", "old", "target", "expected"),
    [
        (1.0, 0.0, 0.0, 0.5),
        (1.0, 0.0, 2.0, 0.5 * 1.8**2),  # the clipped value 0.2 is further off, and counts
        (1.0, 1.1, 2.0, 0.5),  # inside the clip
    ],
)
def test_value_loss(value: float, old: float, target: float, expected: float) -> None:
    # The value of the state before the action stands at position P + 0 - 1 = 0; position 1 holds 99.
    batch, models = one_token(1.0, 0.0, value=value, old_value=old, target=target)
    assert term("value", batch, models) == pytest.approx(expected, rel=1e-6)


def test_value_clip_off() -> None:
    batch, models = one_token(1.0, 0.0, value=1.0, old_value=0.0, target=2.0)
    assert term("value", batch, models, value_clip=None) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)])
def test_kl_in_the_loss(estimator: str, expected: float) -> None:
    batch, models = one_token(1.0, 0.0, reference=math.log(0.25) - 0.5)
    options = {"kl_in": "loss", "kl_coef": 0.3, "kl_estimator": estimator}
    assert term("kl", batch, models, **options) == pytest.approx(expected, rel=1e-5)
    assert PPO(PPOConfig(**options)).terms["kl"].coefficient == 0.3


def test_entropy_bonus_lowers_the_objective() -> None:
    batch, models = one_token(1.0, 0.0)
    ppo = PPO(PPOConfig(entropy_coef=0.01))
    output = ppo.loss(models, batch)
    assert float(output.sums["entropy"].detach()) == pytest.approx(math.log(4), rel=1e-6)
    assert ppo.terms["entropy"].coefficient == -0.01


def test_entropy_as_a_metric_has_no_graph() -> None:
    batch, models = one_token(1.0, 0.0)
    with_bonus, without = (PPO(PPOConfig(entropy_coef=c)).loss(models, batch) for c in (0.01, 0.0))
    assert with_bonus.sums["entropy"].requires_grad
    assert "entropy" not in without.sums
    measured = without.metrics["policy/entropy"]
    assert isinstance(measured, Mean) and float(measured.total) == pytest.approx(math.log(4), rel=1e-6)


def test_shares_of_the_pretraining_loss_are_convex() -> None:
    ppo = PPO(PPOConfig(entropy_coef=0.01, kl_in="loss", kl_coef=0.5).model_copy(update={"ptx_coef": 0.9}))
    weights = {name: each.coefficient for name, each in ppo.terms.items()}
    assert weights == pytest.approx({"policy": 0.1, "entropy": -0.001, "kl": 0.05, "ptx": 0.9, "value": 1.0})


AGGREGATIONS = ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "sequence-mean-token-sum-norm"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations(aggregation: Any) -> None:
    """Two answers of 1 and 3 tokens, each token's loss -1 and -2."""
    items = [
        BufferItem(
            sample_id=length,
            group_id=length,
            policy_version=0,
            prompt_ids=torch.tensor([1]),
            response_ids=torch.full((length,), 2),
            action_mask=torch.ones(length, dtype=torch.bool),
            action_log_probs=torch.full((length,), math.log(0.25)),
            advantages=torch.full((length,), advantage),
            values=torch.zeros(length),
            returns=torch.zeros(length),
        )
        for length, advantage in ((1, 1.0), (3, 2.0))
    ]
    models = {"policy": Given(torch.zeros(2, 4, 4), wrap=True), "critic": Given(torch.zeros(2, 4), wrap=False)}
    ppo = PPO(PPOConfig(kl_coef=0.0, aggregation=aggregation, norm_length=10))
    batch = collate(items)
    mean = float(ppo.loss(models, batch).sums["policy"].detach()) / ppo.counts(batch)["policy"]
    expected = {
        "token-mean": -7 / 4,
        "sequence-mean-token-mean": -(1 + 2) / 2,
        "sequence-mean-token-sum": -(1 + 6) / 2,
        "sequence-mean-token-sum-norm": -(0.1 + 0.6) / 2,
    }
    assert mean == pytest.approx(expected[aggregation], rel=1e-6)


def slow_sums(items: Sequence[BufferItem], logits: Tensor, values: Tensor, config: PPOConfig) -> dict[str, float]:
    """Every term in plain float64 Python. logits [B, S, V] and values [B, S] by place among a row's own tokens."""
    sums = dict.fromkeys(("policy", "value", "entropy", "kl"), 0.0)
    low = 0.2 if config.clip_eps is None else config.clip_eps
    high = low if config.clip_eps_high is None else config.clip_eps_high
    for row, item in enumerate(items):
        assert item.advantages is not None and item.reference_log_probs is not None
        assert item.values is not None and item.returns is not None
        for t, token in enumerate(item.response_ids.tolist()):
            place = item.prompt_ids.numel() + t - 1
            scores = [float(x) for x in logits[row, place]]
            total = math.fsum(math.exp(x) for x in scores)
            log_probs = [x - math.log(total) for x in scores]
            ratio = math.exp(log_probs[token] - float(item.action_log_probs[t]))
            advantage = float(item.advantages[t])
            loss = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
            if config.dual_clip is not None and advantage < 0:
                loss = min(loss, -config.dual_clip * advantage)
            sums["policy"] += loss
            sums["entropy"] -= math.fsum(math.exp(x) * x for x in log_probs)
            difference = log_probs[token] - float(item.reference_log_probs[t])
            sums["kl"] += math.exp(-difference) - 1 + difference
            old, target, value = float(item.values[t]), float(item.returns[t]), float(values[row, place])
            near = min(max(value, old - 0.2), old + 0.2)
            sums["value"] += 0.5 * max((value - target) ** 2, (near - target) ** 2)
    return sums


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), dual=st.sampled_from([None, 1.5]), high=st.sampled_from([None, 0.3]))
def test_against_a_slow_float64_reference(
    make_items: Callable[..., list[BufferItem]], seed: int, dual: float | None, high: float | None
) -> None:
    items = make_items(4, seed)
    batch = collate(items)
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(*batch.sequences.shape, VOCABULARY, generator=random)
    values = torch.randn(batch.sequences.shape, generator=random)
    config = PPOConfig(
        dual_clip=dual, clip_eps_high=high, entropy_coef=0.01, kl_in="loss", kl_coef=0.1, kl_estimator="k3"
    )
    models = {"policy": Given(logits, wrap=True), "critic": Given(values, wrap=False)}
    sums = {name: float(each.detach()) for name, each in PPO(config).loss(models, batch).sums.items()}
    assert sums == pytest.approx(slow_sums(items, logits, values, config), rel=1e-4, abs=1e-4)


def test_what_is_masked_reaches_neither_loss_nor_gradient(make_items: Callable[..., list[BufferItem]]) -> None:
    items = make_items(3)
    broken = replace(
        items[0],
        action_mask=torch.zeros_like(items[0].action_mask),
        advantages=torch.full_like(items[0].action_log_probs, math.nan),
        returns=torch.full_like(items[0].action_log_probs, math.inf),
    )
    shape = collate([broken, *items[1:]]).sequences.shape
    logits, values = torch.randn(*shape, VOCABULARY), torch.randn(shape)
    models = {"policy": Given(logits, wrap=True), "critic": Given(values, wrap=False)}
    output = PPO(PPOConfig()).loss(models, collate([broken, *items[1:]]))
    (output.sums["policy"] + output.sums["value"]).backward()
    for name, model in models.items():
        gradient = model.outputs.grad
        assert isinstance(gradient, Tensor)
        assert bool(gradient.isfinite().all()), name
        assert not gradient[0].any(), name
    empty = PPO(PPOConfig()).loss(models, collate([replace(i, action_mask=i.action_mask & False) for i in items]))
    assert float(empty.sums["policy"].detach()) == 0.0 and float(empty.sums["value"].detach()) == 0.0
