"""DPO and reward-model losses on whole batches against float64 loops, and what their items are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlhf_core.errors import DataError, UserInputError
from rlhf_models.classifier import as_score_model
from rlhf_testing.models import tiny_model, tiny_tokenizer

RECORDS = [
    {"prompt": "31>", "chosen": "13", "rejected": "31", "margin": 0.25},
    {"prompt": "542>", "chosen": "245", "rejected": "5", "margin": 1.0},
    {"prompt": "9", "chosen": "9", "rejected": "1234", "margin": 0.0},
]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model(seed=1)


@pytest.fixture(scope="module")
def start() -> torch.nn.Module:
    return tiny_model(seed=2)


def answer_log_prob(model: torch.nn.Module, prompt: str, answer: str, *, mean: bool = False) -> float:
    """Token by token, one text at a time, in float64; EOS is part of the answer."""
    tokenizer = tiny_tokenizer()
    before, after = tokenizer(prompt)["input_ids"], [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([before + after])).logits[0].double().log_softmax(-1)
    terms = [float(logits[len(before) + t - 1, token]) for t, token in enumerate(after)]
    return sum(terms) / len(terms) if mean else sum(terms)


def prepared(made: Any, start: torch.nn.Module) -> list[Any]:
    calls: list[int] = []

    def reference(items: Any) -> list[torch.Tensor]:
        calls.append(len(items))
        with torch.no_grad():
            return list(made.reference_forward(start, made.collate(items))) if items else []

    items = [made.encode(record, tiny_tokenizer()) for record in RECORDS]
    ready = list(made.prepare_items(items, reference))
    again = list(made.prepare_items(items, reference))
    assert sum(calls) == (0 if "reference" not in made.roles else len(RECORDS)), "the reference is asked once"
    assert all(a.reference is b.reference for a, b in zip(ready, again, strict=True))
    return ready


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reference_free", [False, True])
def test_sigmoid(
    algorithm: Any, model: torch.nn.Module, start: torch.nn.Module, smoothing: float, reference_free: bool
) -> None:
    made = algorithm("dpo", {"beta": 0.3, "label_smoothing": smoothing, "reference_free": reference_free})
    output = made.loss({"policy": model}, made.collate(prepared(made, start)))
    expected = []
    for record in RECORDS:
        h = [answer_log_prob(model, record["prompt"], record[key]) for key in ("chosen", "rejected")]
        if not reference_free:
            h = [x - answer_log_prob(start, record["prompt"], record[k]) for x, k in zip(h, ("chosen", "rejected"))]  # noqa: B905
        z = 0.3 * (h[0] - h[1])
        expected.append(-(1 - smoothing) * log_sigmoid(z) - smoothing * log_sigmoid(-z))
    assert output.sums["policy"].item() == pytest.approx(sum(expected), rel=1e-5)
    assert made.roles == ({"policy"} if reference_free else {"policy", "reference"})


@pytest.mark.parametrize("kind", ["ipo", "hinge"])
def test_ipo_and_hinge(algorithm: Any, model: torch.nn.Module, start: torch.nn.Module, kind: str) -> None:
    made = algorithm("dpo", {"beta": 0.3, "loss": kind})
    output = made.loss({"policy": model}, made.collate(prepared(made, start)))
    expected, right = 0.0, 0
    for record in RECORDS:
        sides = []
        for key in ("chosen", "rejected"):
            text = record["prompt"], record[key]
            sides.append(
                answer_log_prob(model, *text, mean=kind == "ipo") - answer_log_prob(start, *text, mean=kind == "ipo")
            )
        h = sides[0] - sides[1]
        right += h > 0
        expected += (h - 1 / 0.6) ** 2 if kind == "ipo" else max(0.0, 1 - 0.3 * h)
    assert output.sums["policy"].item() == pytest.approx(expected, rel=1e-5)
    accuracy = output.metrics["preference/accuracy"]
    assert float(accuracy.total) == right and float(accuracy.count) == 3


@pytest.mark.parametrize("options", [{}, {"use_margin": True}, {"use_margin": True, "centring_coef": 0.1}])
def test_bradley_terry(algorithm: Any, options: dict[str, Any]) -> None:
    tokenizer = tiny_tokenizer()
    made = algorithm("reward-model", options, tokenizer)
    model = as_score_model(tiny_model(seed=1), tokenizer)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))

    def score(prompt: str, answer: str) -> float:
        ids = [*tokenizer(prompt + answer)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids])).logits.item()

    output = made.loss({"policy": model}, made.collate([made.encode(record, tokenizer) for record in RECORDS]))
    expected = 0.0
    for record in RECORDS:
        chosen, rejected = (score(record["prompt"], record[key]) for key in ("chosen", "rejected"))
        margin = record["margin"] if options.get("use_margin") else 0.0
        expected -= log_sigmoid(chosen - rejected - margin)
        expected += options.get("centring_coef", 0.0) * (chosen + rejected) ** 2
    assert output.sums["policy"].item() == pytest.approx(expected, rel=1e-5)


def test_the_score_is_read_at_the_last_token_when_pad_is_eos(algorithm: Any) -> None:
    """Where pad and EOS are one, the reading "rightmost token that is not padding" would miss the end."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    made = algorithm("reward-model", {}, tokenizer)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    model = as_score_model(tiny_model(seed=1), tokenizer)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    pairs = [made.encode(record, tokenizer) for record in RECORDS]
    together = made.loss({"policy": model}, made.collate(pairs)).sums["policy"].item()
    alone = sum(made.loss({"policy": model}, made.collate([pair])).sums["policy"].item() for pair in pairs)
    assert together == pytest.approx(alone, rel=1e-5), "padding must not move the position that is read"
    tokenizer.eos_token = None
    with pytest.raises(UserInputError, match="lacks an end-of-sequence token"):
        algorithm("reward-model", {}, tokenizer)


def test_a_new_score_head_says_zero() -> None:
    tokenizer = tiny_tokenizer()
    policy = tiny_model(seed=1)
    model = as_score_model(policy, tokenizer)
    assert model(input_ids=torch.tensor([[4, 5, 2]])).logits.tolist() == [[0.0]]
    for name, weight in policy.base_model.state_dict().items():
        assert torch.equal(model.base_model.state_dict()[name], weight)
    assert as_score_model(model, tokenizer) is model


@pytest.mark.parametrize("name", ["dpo", "reward-model"])
def test_pairs_that_cannot_be(algorithm: Any, name: str) -> None:
    made = algorithm(name, {"max_tokens": 8})
    tokenizer = tiny_tokenizer()
    for lacking in ("chosen", "rejected"):
        record = {key: value for key, value in RECORDS[0].items() if key != lacking}
        with pytest.raises(DataError, match=f"{name}: the record's `{lacking}` must be text") as error:
            made.encode(record, tokenizer)
        assert '"rejected": "…"' in str(error.value)
    assert made.encode({"prompt": "1>", "chosen": "12345678", "rejected": "1"}, tokenizer) is None, "too long"
    assert made.encode({"prompt": "1>", "chosen": "1", "rejected": "1"}, tokenizer) is None, "nothing to learn"
    if name == "reward-model":
        with pytest.raises(DataError, match="`margin` must be a number, got None"):
            algorithm(name, {"use_margin": True}).encode({**RECORDS[0], "margin": None}, tokenizer)
