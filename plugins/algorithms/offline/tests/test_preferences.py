"""KTO, ORPO and SimPO on whole batches against loops over single texts, and what their items are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlhf_core.errors import DataError
from rlhf_testing.models import tiny_model, tiny_tokenizer

PAIRS = [
    {"prompt": "31>", "chosen": "13", "rejected": "31"},
    {"prompt": "542>", "chosen": "245", "rejected": "5"},
    {"prompt": "9", "chosen": "9", "rejected": "1234"},
]
JUDGED = [
    {"prompt": "31>", "completion": "13", "label": True},
    {"prompt": "542>", "completion": "5", "label": False},
    PAIRS[2],
]


@pytest.fixture(scope="module")
def policy() -> torch.nn.Module:
    return tiny_model(seed=1)


@pytest.fixture(scope="module")
def start() -> torch.nn.Module:
    return tiny_model(seed=2)


def log_probs(model: torch.nn.Module, prompt: str, answer: str) -> list[float]:
    """Token by token, one text at a time; EOS is part of the answer."""
    tokenizer = tiny_tokenizer()
    before, after = tokenizer(prompt)["input_ids"], [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([before + after])).logits[0].double().log_softmax(-1)
    return [float(logits[len(before) + t - 1, token]) for t, token in enumerate(after)]


def asked(made: Any, model: torch.nn.Module) -> Any:
    def ask(items: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(made.reference_forward(model, made.collate(items))) if items else []

    return ask


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("name", ["orpo", "simpo"])
def test_means_per_token(algorithm: Any, policy: torch.nn.Module, name: str) -> None:
    options = {"orpo": {"odds_coef": 0.5}, "simpo": {"beta": 1.5, "gamma": 0.3}}[name]
    made = algorithm(name, options)
    assert made.roles == {"policy"}
    output = made.loss({"policy": policy}, made.collate([made.encode(each, tiny_tokenizer()) for each in PAIRS]))
    total, right = 0.0, 0
    for record in PAIRS:
        chosen, rejected = (mean(log_probs(policy, record["prompt"], record[key])) for key in ("chosen", "rejected"))
        right += chosen > rejected
        if name == "simpo":
            total += math.log1p(math.exp(-(1.5 * (chosen - rejected) - 0.3)))
        else:
            odds = [x - math.log(1 - math.exp(x)) for x in (chosen, rejected)]
            total += -chosen + 0.5 * math.log1p(math.exp(-(odds[0] - odds[1])))
    assert output.sums["policy"].item() == pytest.approx(total, rel=1e-5)
    assert int(output.metrics["preference/accuracy"].total) == right


def test_kto(algorithm: Any, policy: torch.nn.Module, start: torch.nn.Module) -> None:
    made = algorithm("kto", {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8})
    items = made.prepare_items([made.encode(each, tiny_tokenizer()) for each in JUDGED], asked(made, start))
    made.start_episode(items, policy=asked(made, policy), reference=asked(made, start))

    def gap(prompt: str, answer: str) -> float:
        return sum(log_probs(policy, prompt, answer)) - sum(log_probs(start, prompt, answer))

    # Answers to the next prompt, of pairs the first and the second in turn: the pair is turned[1].
    kl = max(0.0, mean([gap("31>", "5"), gap("542>", "1234"), gap("9", "13")]))
    answers = [("31>", "13", True), ("542>", "5", False), ("9", "9", True), ("9", "1234", False)]
    expected = 0.0
    for prompt, answer, good in answers:
        gain = 0.3 * (gap(prompt, answer) - kl)
        expected += 1.2 / (1 + math.exp(gain)) if good else 0.8 / (1 + math.exp(-gain))
    batch = made.collate(items)
    output = made.loss({"policy": policy}, batch)
    assert output.sums["policy"].item() == pytest.approx(expected, rel=1e-4)
    assert made.counts(batch) == {"policy": 4.0} and len(batch) == 3
    assert float(output.metrics["kl/mean"].total) == pytest.approx(4 * kl, abs=1e-5)
    accuracy = output.metrics["preference/accuracy"]
    assert float(accuracy.count) == 1 and float(accuracy.total) == float(gap("9", "9") > gap("9", "1234"))


def test_the_kl_is_that_of_the_policy_and_never_negative(algorithm: Any, start: torch.nn.Module) -> None:
    made = algorithm("kto")
    items = made.prepare_items([made.encode(each, tiny_tokenizer()) for each in JUDGED], asked(made, start))
    for policy in (start, tiny_model(seed=1)):
        for ours, its in ((policy, start), (start, policy)):
            made.start_episode(items, policy=asked(made, ours), reference=asked(made, its))
            output = made.loss({"policy": start}, made.collate(items))
            assert float(output.metrics["kl/mean"].total) >= 0
    made.start_episode(items, policy=asked(made, start), reference=asked(made, start))
    output = made.loss({"policy": start}, made.collate(items))
    assert output.sums["policy"].item() == pytest.approx(2.0), "at the reference every answer is worth a half"
    made.start_episode(items[:1], policy=asked(made, start), reference=asked(made, start))  # nothing to mix up


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "1>", "completion": "1"}, "`label` must be true or false, got None"),
        ({"prompt": "1>", "completion": "1", "label": "good"}, "`label` must be true or false, got 'good'"),
        ({"prompt": "1>", "label": True}, "`completion` must be text"),
        ({"prompt": "1>", "chosen": "1"}, "`rejected` must be text"),
    ],
)
def test_lines_that_judge_nothing(algorithm: Any, record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        algorithm("kto").encode(record, tiny_tokenizer())


def test_long_answers_are_skipped(algorithm: Any) -> None:
    made = algorithm("kto", {"max_tokens": 6})
    assert made.encode({"prompt": "1>", "completion": "12345678", "label": True}, tiny_tokenizer()) is None
    assert made.encode({"prompt": "1>", "chosen": "12345678", "rejected": "1"}, tiny_tokenizer()) is None


def test_rows_of_lines_with_one_and_two_answers(algorithm: Any) -> None:
    made = algorithm("kto")
    batch = made.collate([made.encode(each, tiny_tokenizer()) for each in (PAIRS[0], JUDGED[1], PAIRS[1])])
    assert batch.line.tolist() == [0, 1, 2, 0, 2] and len(batch) == 3
    assert batch.good.tolist() == [True, False, True, False, False]
    values = torch.arange(1.0, 6.0)
    assert [each.tolist() for each in batch.pairs(values)] == [[1, 3], [4, 5]]
    assert batch.by_line(values).tolist() == [[1, 4], [2, 0], [3, 5]]
