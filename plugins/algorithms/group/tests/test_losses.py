"""The whole objective of a micro-batch, for each policy loss, KL and aggregation, against float64 loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf_core.algorithm import LossOutput
from rlhf_core.batching import collate, split
from rlhf_core.plugins.selected import load
from rlhf_core.types import Experience
from rlhf_forward.forward import policy_forward
from rlhf_forward.masking import mask_from_lengths
from rlhf_testing.models import tiny_model

LENGTHS = [2, 3, 1, 4]
AGGREGATIONS = [
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
    "sequence-mean-token-sum-norm",
]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model(seed=0)


@pytest.fixture(scope="module")
def batch(model: torch.nn.Module) -> Experience:
    """Four answers; the old policy differs from the model by up to half a nat a token."""
    generator = torch.Generator().manual_seed(0)
    mask = mask_from_lengths(torch.tensor(LENGTHS), 4)
    attention = torch.cat([torch.ones(4, 3, dtype=torch.bool), mask], dim=1)
    tokens = torch.randint(4, 12, (4, 7), generator=generator)
    plain = Experience(
        sequences=torch.where(attention, tokens, 0),
        attention_mask=attention,
        action_mask=mask,
        action_log_probs=torch.zeros(4, 4),
        sample_ids=torch.arange(4),
        group_ids=torch.tensor([0, 0, 1, 1]),
        policy_versions=torch.zeros(4, dtype=torch.int64),
        truncated=torch.zeros(4, dtype=torch.bool),
    )
    with torch.no_grad():
        now = policy_forward(model, plain, 1.0).log_probs
    noise = torch.rand(3, 4, 4, generator=generator) - 0.5
    return replace(
        plain,
        action_log_probs=torch.where(mask, now + noise[0], 0.0),
        reference_log_probs=torch.where(mask, now + noise[1], 0.0),
        advantages=torch.where(mask, torch.randn(4, 4, generator=generator), 0.0),
    )


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def clip_loss(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def reference_losses(name: str, batch: Experience, now: torch.Tensor, low: float, high: float) -> list[list[float]]:
    rows = []
    for i, n in enumerate(LENGTHS):
        log_ratio = [float(now[i, t]) - float(batch.action_log_probs[i, t]) for t in range(n)]
        advantage = [float(batch.advantages[i, t]) for t in range(n)]
        if name == "gspo":
            log_ratio = [sum(log_ratio) / n] * n
        ratio = [math.exp(x) for x in log_ratio]
        if name == "cispo":
            row = [
                -clip(r, 1 - low, 1 + high) * a * float(now[i, t])
                for t, (r, a) in enumerate(zip(ratio, advantage, strict=True))
            ]
        else:
            row = [clip_loss(r, a, low, high) for r, a in zip(ratio, advantage, strict=True)]
        rows.append(row)
    return rows


def aggregate(rows: list[list[float]], aggregation: str, norm: int) -> float:
    if aggregation == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    divisor = {"token-mean": len, "token-sum": lambda row: 1, "token-sum-norm": lambda row: norm}
    per_row = [sum(row) / divisor[aggregation.removeprefix("sequence-mean-")](row) for row in rows]
    return sum(per_row) / len(rows)


def objective(made: Any, output: LossOutput, counts: dict[str, float]) -> float:
    return sum(term.coefficient * output.sums[name].item() / counts[name] for name, term in made.terms.items())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("name", "low", "high"), [("clip", 0.1, 0.3), ("gspo", 0.02, 0.05), ("cispo", 0.2, 0.1)])
def test_the_objective(
    algorithm: Callable[..., Any],
    model: torch.nn.Module,
    batch: Experience,
    name: str,
    low: float,
    high: float,
    aggregation: str,
) -> None:
    options = {"policy_loss": name, "clip_eps": low, "clip_eps_high": high, "aggregation": aggregation, "kl_coef": 0.2}
    made = algorithm("grpo", options)
    output = made.loss({"policy": model}, batch)
    now = output.log_probs.double()
    expected = aggregate(reference_losses(name, batch, now, low, high), aggregation, norm=8)
    kl = []
    for i, n in enumerate(LENGTHS):
        gaps = [float(now[i, t]) - float(batch.reference_log_probs[i, t]) for t in range(n)]
        kl.append([math.exp(-gap) - 1 + gap for gap in gaps])
    expected += 0.2 * aggregate(kl, aggregation, norm=8)
    assert objective(made, output, made.counts(batch)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_in_the_loss(
    algorithm: Callable[..., Any], model: torch.nn.Module, batch: Experience, estimator: str
) -> None:
    made = algorithm("grpo", {"kl_estimator": estimator})
    output = made.loss({"policy": model}, batch)
    gaps = (output.log_probs.double() - batch.reference_log_probs.double())[batch.action_mask].tolist()
    formula = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}[estimator]
    assert output.sums["kl"].item() == pytest.approx(sum(map(formula, gaps)), rel=1e-5)
    assert algorithm("grpo", {"kl_coef": 0}).roles == {"policy"}, "no KL, no reference model"


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo"])
def test_splitting_a_batch_changes_nothing(
    algorithm: Callable[..., Any], model: torch.nn.Module, batch: Experience, aggregation: str, loss: str
) -> None:
    made = algorithm("grpo", {"aggregation": aggregation, "policy_loss": loss, "entropy_coef": 0.01})
    items = split(batch)

    def gradient(parts: list[list[int]]) -> torch.Tensor:
        batches = [collate([items[i] for i in part]) for part in parts]
        counts = {name: sum(made.counts(each)[name] for each in batches) for name in made.terms}
        model.zero_grad()
        for each in batches:
            output = made.loss({"policy": model}, each)
            parts_of_loss = [t.coefficient * output.sums[n] / counts[n] for n, t in made.terms.items()]
            torch.autograd.backward(torch.stack(parts_of_loss).sum())
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole = gradient([[0, 1, 2, 3]])
    assert whole.abs().max() > 0
    for parts in ([[0], [1], [2], [3]], [[2, 0], [3, 1]], [[1], [3, 2, 0]]):
        torch.testing.assert_close(gradient(parts), whole, rtol=1e-4, atol=1e-6)


def test_dual_clip_bounds_the_loss(algorithm: Callable[..., Any], model: torch.nn.Module, batch: Experience) -> None:
    far = replace(batch, action_log_probs=batch.action_log_probs - 3.0, advantages=-torch.ones(4, 4))
    made = algorithm("grpo", {"policy_loss": {"name": "clip", "dual_clip": 2.0}, "kl_coef": 0})
    output = made.loss({"policy": model}, far)
    assert output.sums["policy"].item() == pytest.approx(2.0 * sum(LENGTHS))


def test_metrics(algorithm: Callable[..., Any], model: torch.nn.Module, batch: Experience) -> None:
    output = algorithm("grpo", {"clip_eps": 0.1, "kl_coef": 0}).loss({"policy": model}, batch)
    now = output.log_probs.double()
    means = {name: float(metric.total) / float(metric.count) for name, metric in output.metrics.items()}
    gaps = (now - batch.action_log_probs.double())[batch.action_mask].tolist()
    assert means["policy/ratio_mean"] == pytest.approx(sum(map(math.exp, gaps)) / 10, rel=1e-5)
    k3 = [math.exp(gap) - 1 - gap for gap in gaps]  # of the old policy's samples, towards the new one
    assert means["policy/approx_kl"] == pytest.approx(sum(k3) / 10, rel=1e-5)
    signs = batch.advantages[batch.action_mask].tolist()
    clipped = [(math.exp(g) > 1.1 and a > 0) or (math.exp(g) < 0.9 and a < 0) for g, a in zip(gaps, signs, strict=True)]
    assert means["policy/clip_fraction"] == pytest.approx(sum(clipped) / 10)
    assert 0 < means["policy/entropy"] < math.log(20)


def test_after_a_correction_the_ratio_starts_from_the_trainers_log_probs(
    algorithm: Callable[..., Any], model: torch.nn.Module, batch: Experience
) -> None:
    made = algorithm("grpo", {"importance_cap": 2.0, "kl_coef": 0})
    now = made.loss({"policy": model}, batch).log_probs
    output = made.loss({"policy": model}, replace(batch, trainer_log_probs=now))
    ratio = output.metrics["policy/ratio_mean"]
    assert float(ratio.total) / float(ratio.count) == pytest.approx(1.0, abs=1e-6)
    assert output.sums["policy"].item() == pytest.approx(-float(batch.advantages.sum()), rel=1e-5)


def test_no_option_names_a_critic() -> None:
    for name in ("grpo", "rloo", "reinforce++"):
        fields = load("algorithms", name).component.config.model_fields
        assert not [field for field in fields if "critic" in field or "value" in field or "vf" in field]
