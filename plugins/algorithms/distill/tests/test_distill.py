"""Advantages and losses of whole batches against loops, and what three ranks make of an episode."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.batching import split
from rlhf_core.columns import Columns
from rlhf_core.errors import ConfigError
from rlhf_core.rewards.combiner import RewardCombiner
from rlhf_core.rollout import collected_episode
from rlhf_core.training.batches import BatchPlan
from rlhf_core.training.estimates import EpisodeEstimator
from rlhf_core.types import PhaseTimes
from rlhf_distill.teacher import TeacherPass
from rlhf_testing.contracts import AlgorithmContract
from rlhf_testing.models import tiny_model
from rlhf_testing.thread_ranks import Ranks

LENGTHS = [3, 5, 1, 4]


def taught(episode: Any, top_k: int) -> Any:
    """The episode as a teacher of another seed sees it."""
    model = tiny_model(seed=7).eval()
    context: Any = SimpleNamespace(temperature=1.0)
    teacher = TeacherPass(context, {}, top_k=top_k, vocabulary=model.config.vocab_size)
    with torch.no_grad():
        return replace(episode, columns=Columns(teacher.columns_of(teacher.forward(model, episode)), teacher.columns))


def distributions(model: Any, episode: Any) -> list[list[list[float]]]:
    """Row, token -> log-probs of all tokens, each row alone, in float64."""
    found = []
    for row, mask in zip(episode.sequences, episode.action_mask, strict=True):
        length = int(mask.sum())
        with torch.no_grad():
            logits = model(input_ids=row[None, : 2 + length]).logits[0].double().log_softmax(-1)
        found.append([logits[1 + t].tolist() for t in range(length)])
    return found


@pytest.mark.parametrize("reward_coef", [0.0, 0.5])
def test_advantages_are_the_log_ratios_and_the_rewards(algorithm: Any, episode: Any, reward_coef: float) -> None:
    given = taught(episode(LENGTHS), 0)
    made = algorithm({"distill_coef": 2.0, "reward_coef": reward_coef}).advantages(given)
    gains = [
        [
            float(given.columns["teacher_log_probs"][row, t, 0]) - float(given.action_log_probs[row, t])
            for t in range(length)
        ]
        for row, length in enumerate(LENGTHS)
    ]
    mean = sum(map(sum, gains)) / sum(LENGTHS)
    scores = given.scores.double().tolist()
    for row, length in enumerate(LENGTHS):
        own = reward_coef * (scores[row] - scores[row ^ 1])  # the other sample of its prompt
        for t in range(length):
            expected = 2.0 * (gains[row][t] - mean) + own
            assert made.advantages[row, t].item() == pytest.approx(expected, abs=1e-5)
        assert not made.advantages[row, length:].any()
    assert made.metrics["distill/reverse_kl"] == pytest.approx(-mean, abs=1e-6)


def test_the_episode_is_a_baseline_of_single_answers(algorithm: Any, episode: Any) -> None:
    given = taught(episode(LENGTHS), 4)
    options = {"top_k": 4, "reward_coef": 1.0, "baseline": "episode"}
    made = algorithm(options, samples_per_prompt=1).advantages(given)
    scores = given.scores.double().tolist()
    for row in range(4):
        others = [score for index, score in enumerate(scores) if index != row]
        assert made.advantages[row, 0].item() == pytest.approx(scores[row] - sum(others) / 3, abs=1e-6)
    with pytest.raises(ConfigError, match="samples_per_prompt is 1"):
        algorithm({"reward_coef": 1.0}, samples_per_prompt=1)


def test_the_sampled_tokens_loss_has_the_gradient_of_the_reverse_kl(algorithm: Any, episode: Any) -> None:
    """Before the first step the ratio is 1: the loss is minus the mean advantage of the tokens."""
    policy = tiny_model(seed=1)
    bare = episode(LENGTHS)
    log_probs = torch.zeros(bare.action_mask.shape)
    for row, tokens in enumerate(distributions(policy, bare)):
        for t, each in enumerate(tokens):
            log_probs[row, t] = each[int(bare.sequences[row, 2 + t])]
    made = algorithm()
    batch = made.advantages(taught(replace(bare, action_log_probs=log_probs), 0))
    output = made.loss({"policy": policy}, batch)
    assert set(output.sums) == set(made.terms) == set(made.counts(batch)) == {"policy"}
    assert output.sums["policy"].item() == pytest.approx(-batch.advantages.sum().item(), abs=1e-3)
    assert made.counts(batch)["policy"] == sum(LENGTHS)


@pytest.mark.parametrize("kind", ["reverse-kl", "forward-kl", "jsd"])
@pytest.mark.parametrize("top_k", [3, 15])
def test_the_loss_is_a_divergence_at_each_sampled_token(algorithm: Any, episode: Any, kind: str, top_k: int) -> None:
    policy = tiny_model(seed=1)
    given = taught(episode(LENGTHS), top_k)
    made = algorithm({"divergence": kind, "top_k": top_k, "jsd_weight": 0.3})
    batch = made.advantages(given)
    output = made.loss({"policy": policy}, batch)
    assert set(output.sums) == {"distill"}
    total, mass = 0.0, 0.0
    for p_row, t_row in zip(distributions(policy, given), distributions(tiny_model(seed=7), given), strict=True):
        for p, t in zip(p_row, t_row, strict=True):
            ids = sorted(range(len(t)), key=lambda i: -t[i])[:top_k]
            sides = [[math.exp(each[i]) for i in ids] for each in (p, t)]
            ours, its = ([*side, max(1.0 - math.fsum(side), 1e-6)] for side in sides)
            mixture = [0.3 * b + 0.7 * a for a, b in zip(ours, its, strict=True)]
            kl = {
                "reverse-kl": sum(a * math.log(a / b) for a, b in zip(ours, its, strict=True)),
                "forward-kl": sum(b * math.log(b / a) for a, b in zip(ours, its, strict=True)),
                "jsd": sum(
                    0.3 * b * math.log(b / m) + 0.7 * a * math.log(a / m)
                    for a, b, m in zip(ours, its, mixture, strict=True)
                ),
            }
            total += kl[kind]
            mass += math.fsum(sides[1])
    assert output.sums["distill"].item() == pytest.approx(total, rel=1e-3, abs=1e-4)
    metric = output.metrics["distill/teacher_mass"]
    assert float(metric.total) / float(metric.count) == pytest.approx(mass / sum(LENGTHS), abs=1e-5)


def test_rewards_beside_a_divergence_are_a_term_of_their_own(algorithm: Any, episode: Any) -> None:
    made = algorithm({"top_k": 3, "distill_coef": 0.2, "reward_coef": 1.0})
    batch = made.advantages(taught(episode(LENGTHS), 3))
    assert set(made.loss({"policy": tiny_model(seed=1)}, batch).sums) == {"distill", "policy"}
    assert made.terms["distill"].coefficient == 0.2 and made.terms["policy"].coefficient == 1.0


@pytest.mark.parametrize("options", [{}, {"top_k": 3, "reward_coef": 1.0}])
def test_ranks_compute_what_one_computes(algorithm: Any, episode: Any, options: dict[str, Any]) -> None:
    lengths = [3, 5, 1, 4, 2, 6, 3]
    given = taught(episode(lengths), options.get("top_k", 0))
    items = [replace(item, rewards={"it": float(item.score or 0.0)}, score=None) for item in split(given)]
    expected = algorithm(options).advantages(given)
    rows = {item.sample_id: item for item in split(expected)}
    plans = [BatchPlan(3, 1, rank, 3) for rank in range(3)]

    def work(rank: int, strategy: Any) -> Any:
        scores = RewardCombiner({"it": 1.0})
        made = EpisodeEstimator(algorithm(options), scores, strategy, plans[rank])
        found = made.of(collected_episode(items, PhaseTimes()), 0)
        return [item for each in found.epochs for batch in each for item in batch], found.metrics

    seen = set()
    for mine, metrics in Ranks(3).run(work):
        for item in mine:
            if item.action_mask.any():
                seen.add(item.sample_id)
                assert torch.allclose(item.advantages, rows[item.sample_id].advantages, atol=1e-5)
                assert torch.equal(item.columns["teacher_log_probs"], rows[item.sample_id].columns["teacher_log_probs"])
        for name, value in expected.metrics.items():
            assert metrics[name] == pytest.approx(value, abs=1e-5)
    assert seen == set(range(7))


@pytest.mark.parametrize("kind", ["forward-kl", "jsd"])
def test_a_divergence_of_distributions_needs_them(algorithm: Any, kind: str) -> None:
    with pytest.raises(ValidationError, match="requires the teacher's distribution"):
        algorithm({"divergence": kind})


class TestSampledTokens(AlgorithmContract):
    plugin = "distill"
    options = {"teacher": {"path": "builtin:tiny-digits"}, "reward_coef": 1.0}


class TestDistributions(AlgorithmContract):
    plugin = "distill"
    options = {"teacher": {"path": "builtin:tiny-digits"}, "top_k": 5, "reward_coef": 1.0}
