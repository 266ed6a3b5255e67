"""Other sources of loss against slow references in float64: imitation, preference pairs and texts of a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.batching import collate, split
from rlhf_core.columns import Columns
from rlhf_core.episode_view import EpisodeView
from rlhf_core.errors import ConfigError
from rlhf_core.types import Experience
from rlhf_group.config import GRPOConfig, OnlineDPOConfig, RejectionSamplingConfig, RLOOConfig
from rlhf_group.sources import COLUMNS, Sources, best_answers, pairs_of_groups, ranked
from rlhf_objective import ImitationConfig
from rlhf_testing.models import tiny_model, tiny_tokenizer

SCORES = [0.5, 2.0, 2.0, -1.0, 1.0, 1.0]
GROUPS = [0, 0, 0, 0, 1, 1]
LENGTHS = [3, 1, 4, 2, 5, 2]


def view_of(scores: list[float], groups: list[int], samples: list[int] | None = None) -> EpisodeView:
    ids = torch.arange(len(scores)) if samples is None else torch.tensor(samples)
    return EpisodeView(
        sample_ids=ids, group_ids=torch.tensor(groups), scores=torch.tensor(scores), lengths=torch.ones_like(ids)
    )


def test_the_best_answers_are_imitated() -> None:
    view = view_of(SCORES, GROUPS)

    def selected(**options: Any) -> list[int]:
        return best_answers(view, ranked(view), ImitationConfig(**options)).nonzero().flatten().tolist()

    assert selected() == [1], "the earlier of two equal answers, and none of a group with equal scores"
    assert selected(best=4) == [0, 1, 2], "never the worst"
    assert selected(best=None, min_score=1.0) == [1, 2, 4, 5]
    assert selected(best=1, min_score=1.5) == [1]


def test_pairs_are_of_answers_that_differ() -> None:
    view = view_of(SCORES, GROUPS)
    assert pairs_of_groups(view, ranked(view), 0.0).tolist() == [0, 1, 0, -1, 0, 0]
    assert pairs_of_groups(view, ranked(view), 3.5).tolist() == [0] * 6


def test_all_rows_of_an_answer_that_branched_have_its_mark() -> None:
    view = view_of([2.0, 2.0, 1.0, 0.0, 0.0], [0] * 5, samples=[0, 0, 1, 2, 2])
    assert pairs_of_groups(view, ranked(view), 0.0).tolist() == [1, 1, 0, -1, -1]
    assert best_answers(view, ranked(view), ImitationConfig(best=2)).tolist() == [True, True, True, False, False]


def reference_loss(log_probs: Any, reference: Any, pairs: list[tuple[int, int]], kind: str, beta: float) -> float:
    """Sum over pairs of (chosen row, rejected row), as plain loops in float64."""
    total = 0.0
    for chosen, rejected in pairs:
        ratios = []
        for row in (chosen, rejected):
            ratio = sum(float(log_probs[row][t]) - float(reference[row][t]) for t in range(LENGTHS[row]))
            ratios.append(ratio / LENGTHS[row] if kind == "ipo" else ratio)
        gap = ratios[0] - ratios[1]
        total += {
            "sigmoid": math.log1p(math.exp(-beta * gap)),
            "ipo": (gap - 1 / (2 * beta)) ** 2,
            "hinge": max(0.0, 1 - beta * gap),
        }[kind]
    return total


@pytest.fixture
def marked(episode: Callable[..., Experience]) -> Callable[..., Experience]:
    def make(algorithm: Any, rows: Any = (SCORES, GROUPS, LENGTHS), **fields: torch.Tensor) -> Experience:
        rows = episode(*rows, **fields)
        with_advantages: Experience = algorithm.advantages(rows)
        return with_advantages

    return make


def tiny_policy(seed: int = 0) -> Any:
    return tiny_model(tiny_tokenizer(), seed=seed)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_online_dpo_equals_a_slow_reference(kind: str, algorithm: Any, marked: Any) -> None:
    made = algorithm("online-dpo", {"preference": {"beta": 0.3, "loss": kind}}, samples_per_prompt=4)
    reference = -torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    batch = marked(made, reference_log_probs=reference)
    policy = tiny_policy()
    assert made.counts(batch) == {"preference": 1.0}
    output = made.loss({"policy": policy}, batch)
    everything = made.policy_log_probs(policy, batch).detach().double()
    expected = reference_loss(everything, reference.double(), [(1, 3)], kind, 0.3)
    assert set(output.sums) == {"preference"}
    assert float(output.sums["preference"].detach()) == pytest.approx(expected, rel=1e-4)
    gaps = (output.log_probs - everything)[batch.action_mask]
    rows = torch.tensor([1, 3])
    assert (output.log_probs - everything)[rows][batch.action_mask[rows]].abs().max() < 1e-5
    assert gaps.abs().max() > 1e-3, "the other answers are not computed"


@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_the_gradient_of_online_dpo_is_that_of_trl(beta: float, algorithm: Any, marked: Any) -> None:
    """TRL's `OnlineDPOTrainer`: with two answers to a prompt, on sums of log-probs, and a mean over pairs."""
    scores, lengths = [0.5, 2.0, 1.0, -1.0], [3, 5, 4, 2]
    draw = torch.Generator().manual_seed(1)
    reference, start = -torch.rand(4, 5, generator=draw), -3 * torch.rand(4, 5, generator=draw)
    made = algorithm("online-dpo", {"preference": {"beta": beta}}, samples_per_prompt=2)
    batch = marked(made, (scores, [0, 0, 1, 1], lengths), reference_log_probs=reference)
    sources = Sources(preference=made.config.preference)
    log_probs = start.clone().requires_grad_()
    ours = sources.preference_sum(batch, log_probs)[0] / made.counts(batch)["preference"]
    ours.backward()
    theirs = start.double().requires_grad_()
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    sums, reference_sums = (theirs * mask).sum(1), (reference.double() * mask).sum(1)
    is_first = torch.tensor(scores)[0::2] >= torch.tensor(scores)[1::2]
    chosen, rejected = torch.arange(0, 4, 2) + (~is_first).long(), torch.arange(0, 4, 2) + is_first.long()
    ratios = (sums[chosen] - sums[rejected]) - (reference_sums[chosen] - reference_sums[rejected])
    expected = -torch.nn.functional.logsigmoid(beta * ratios).mean()
    expected.backward()
    torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-7)
    assert log_probs.grad is not None and theirs.grad is not None
    torch.testing.assert_close(log_probs.grad.double(), theirs.grad, rtol=1e-5, atol=1e-8)
    assert log_probs.grad[1, 0] < 0 < log_probs.grad[0, 0], "a step raises the better answer and lowers the worse one"


def test_rejection_sampling_equals_a_slow_reference(algorithm: Any, marked: Any) -> None:
    made = algorithm("rejection-sampling", {"imitation": {"best": 2, "coef": 0.5}}, samples_per_prompt=4)
    batch, policy = marked(made), tiny_policy()
    log_probs = made.policy_log_probs(policy, batch).detach().double()
    expected = -sum(float(log_probs[row][t]) for row in (1, 2) for t in range(LENGTHS[row]))
    assert made.counts(batch) == {"imitation": 1 + 4}
    assert made.terms["imitation"].coefficient == 0.5
    output = made.loss({"policy": policy}, batch)
    assert float(output.sums["imitation"].detach()) == pytest.approx(expected, rel=1e-5)


def test_all_sources_are_summed_in_one_update(algorithm: Any, marked: Any, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"prompt": "12", "completion": "34"}\n{"text": "5678"}\n')
    options = {
        "policy_coef": 0.7,
        "imitation": {"coef": 0.1},
        "preference": {"coef": 0.2},
        "records": {"path": str(path), "coef": 0.3},
    }
    plain, made = algorithm("grpo", samples_per_prompt=4), algorithm("grpo", options, samples_per_prompt=4)
    reference = -torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    weights = {name: term.coefficient for name, term in made.terms.items()}
    assert weights == {"policy": 0.7, "kl": 0.04, "imitation": 0.1, "preference": 0.2, "records": 0.3}
    rows = marked(made, reference_log_probs=reference)
    policy, items = tiny_policy(), split(rows)
    batch = made.collate(items)
    together = made.loss({"policy": policy}, batch)
    alone = plain.loss({"policy": policy}, collate(items))
    for name in ("policy", "kl"):
        torch.testing.assert_close(together.sums[name], alone.sums[name])
        assert made.counts(batch)[name] == plain.counts(batch)[name]
    # Records: 3 predicted tokens of the completion with EOS, and 4 + 1 - 1 of the text, three times each.
    tokenizer = tiny_tokenizer()
    sizes = [len(tokenizer("34", add_special_tokens=False)["input_ids"]) + 1, len(tokenizer("5678")["input_ids"])]
    assert made.counts(batch)["records"] == 3 * sum(sizes)
    assert set(together.sums) == set(weights) == set(made.counts(batch))
    total = sum(weights[name] * together.sums[name] / made.counts(batch)[name] for name in weights)
    total.backward()
    assert all(each.grad is not None for each in policy.parameters())


def test_a_split_update_has_the_same_sums_and_counts(algorithm: Any, marked: Any) -> None:
    made = algorithm("online-dpo", {"imitation": {"best": 1}, "kl_coef": 0.1}, samples_per_prompt=4)
    reference = -torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    items, policy = split(marked(made, reference_log_probs=reference)), tiny_policy()
    units = made.units(items)
    assert [[item.sample_id for item in unit] for unit in units] == [[0, 1, 2, 3], [4, 5]]
    whole = made.collate(items)
    parts = [made.collate(unit) for unit in (*units, [made.masked(items[1])])]
    for name in made.terms:
        assert sum(made.counts(part)[name] for part in parts) == made.counts(whole)[name]
        sums = [made.loss({"policy": policy}, part).sums[name] for part in parts]
        torch.testing.assert_close(sum(sums), made.loss({"policy": policy}, whole).sums[name])


def test_a_micro_batch_without_a_mark_changes_no_metric(algorithm: Any, marked: Any) -> None:
    """The first group has a selected answer, and the second none."""
    made = algorithm("rejection-sampling", samples_per_prompt=4)
    items, policy = split(marked(made)), tiny_policy()
    parts = [made.loss({"policy": policy}, made.collate(part)) for part in (items[:4], items[4:])]
    whole = made.loss({"policy": policy}, made.collate(items))
    for name, mean in whole.metrics.items():
        totals = [sum(float(getattr(part.metrics[name], key)) for part in parts) for key in ("total", "count")]
        assert totals == pytest.approx([float(mean.total), float(mean.count)], rel=1e-5), name
    torch.testing.assert_close(parts[1].log_probs, made.collate(items[4:]).action_log_probs)


def test_a_filler_counts_nothing_and_keeps_its_graph(algorithm: Any, marked: Any) -> None:
    for name in ("online-dpo", "rejection-sampling"):
        made = algorithm(name, samples_per_prompt=4)
        items = split(marked(made, reference_log_probs=torch.zeros(6, 5)))
        batch, policy = made.collate([made.masked(items[1])]), tiny_policy()
        assert not any(made.counts(batch).values())
        (loss,) = made.loss({"policy": policy}, batch).sums.values()
        loss.backward()
        assert float(loss.detach()) == 0.0 and all(float(each.grad.abs().sum()) == 0 for each in policy.parameters())


def test_tokens_that_do_not_count_are_not_imitated(algorithm: Any, marked: Any) -> None:
    made = algorithm("rejection-sampling", {"mask_truncated": True}, samples_per_prompt=4)
    batch = marked(made)
    cut = replace(batch, action_mask=batch.action_mask & torch.tensor([[row != 1] for row in range(6)]))
    assert made.counts(batch) == {"imitation": 1.0} and made.counts(cut) == {"imitation": 0.0}


def test_marks_of_another_batch_are_not_needed(episode: Callable[..., Experience]) -> None:
    rows = episode(SCORES, GROUPS, LENGTHS)
    view = EpisodeView.of(rows)
    metrics: dict[str, float] = {}
    marked = Sources(imitation=ImitationConfig(), preference=OnlineDPOConfig().preference).marked(rows, view, metrics)
    assert metrics == {"imitation/selected_fraction": 1 / 6, "preference/pairs_fraction": 0.5}
    assert marked.columns["preferred"].dtype == torch.int8 and set(marked.columns) == set(COLUMNS)
    assert not isinstance(rows.columns, Columns) or not rows.columns


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (GRPOConfig, {"policy_coef": 0}, "leaves nothing to learn from answers"),
        (RLOOConfig, {"policy_coef": 0, "imitation": {}}, "nothing learns from the KL in the reward"),
        (OnlineDPOConfig, {"importance_cap": 2.0}, "importance_cap weights the policy loss, which policy_coef: 0"),
        (GRPOConfig, {"preference": {}, "mask_truncated": True}, "of which mask_truncated masks parts"),
        (GRPOConfig, {"preference": {}, "divergence_bound": 0.1}, "of which divergence_bound masks parts"),
        (RejectionSamplingConfig, {"imitation": {"best": None}}, "good and bad: set best or min_score"),
    ],
)
def test_options_that_cannot_work_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        kind(**options)


def test_too_few_answers_are_refused(algorithm: Any) -> None:
    with pytest.raises(ConfigError, match="a preference pair needs two answers"):
        algorithm("reinforce++", {"preference": {}}, samples_per_prompt=1)
    with pytest.raises(ConfigError, match="group of one"):
        algorithm("online-dpo", samples_per_prompt=1)


def test_the_records_of_a_run_are_named(algorithm: Any, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({"prompt": "1"}))
    with pytest.raises(Exception, match=r"records\.jsonl:1.*has neither"):
        algorithm("grpo", {"records": {"path": str(path)}})
