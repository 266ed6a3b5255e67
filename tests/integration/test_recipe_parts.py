"""Files of code beside the recipes: a control's estimator, an environment with a tool, scripts that make data."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_core.episode_view import EpisodeView
from rlhf_testing.contracts import AdvantageContract, EnvironmentContract
from rlhf_testing.models import save_tiny_model

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def parts(name: str) -> dict[str, Any]:
    return runpy.run_path(str(RECIPES / name))


class TestCalculatorKeepsTheContract(EnvironmentContract):
    plugin = f"{RECIPES / 'calculator' / 'calculator.py'}:Calculator"
    replies = ("CALC(12 * 34)", "The answer is 408.", "CALC(1 + 1) CALC(999999 * 999999)", "408")
    max_turns = 3


class TestShuffledKeepsTheContract(AdvantageContract):
    plugin = f"{RECIPES / 'grpo-sums' / 'shuffled.py'}:shuffled"


@pytest.fixture
def calculator() -> Any:
    """An episode of the environment, begun."""
    environment = parts("calculator/calculator.py")["Calculator"]()
    environment.reset(SimpleNamespace(seed=3))
    return environment


def said(text: str) -> SimpleNamespace:
    return SimpleNamespace(text=text)


def test_the_calculator_calculates_and_the_answer_is_judged(calculator: Any) -> None:
    assert calculator.step(said("I write CALC(12 * 34)."))[0] == "CALC says 408. What is the answer?"
    assert calculator.step(said("CALC(7 - 20)"))[0] == "CALC says -13. What is the answer?"
    calculator.right = 408
    assert calculator.step(said("The answer is 408.")) == (None, 1.0, True)
    assert calculator.step(said("408 or 409")) == (None, 0.0, True)
    assert calculator.step(said("1408")) == (None, 0.0, True)


@pytest.mark.parametrize(
    "text", ["CALC(__import__('os'))", "CALC(9**9**9**9)", "CALC(1/0)", "CALC(1234567 * 1)", "CALC()"]
)
def test_what_is_no_sum_is_not_calculated(calculator: Any, text: str) -> None:
    assert calculator.step(said(text)) == (None, 0.0, True)


def scalars(rewards: list[float], first_sample: int) -> EpisodeView:
    number = len(rewards)
    scores = torch.tensor(rewards)
    return EpisodeView(
        sample_ids=torch.arange(first_sample, first_sample + number),
        group_ids=torch.arange(number) // 4,
        scores=scores,
        totals=scores,
        lengths=torch.ones(number, dtype=torch.int64),
    )


def test_shuffled_advantages_say_nothing_about_answers() -> None:
    shuffled = parts("grpo-sums/shuffled.py")["shuffled"]
    rewards = [1.0, 0.0, 0.0, 0.0] * 8
    found = [shuffled(scalars(rewards, 32 * episode)) for episode in range(200)]
    together = torch.stack(found)
    assert torch.equal(found[0], shuffled(scalars(rewards, 0))), "an episode has one order"
    assert not torch.equal(found[0], found[1]), "another episode has another"
    assert together.reshape(200, 8, 4).sum(-1).abs().max() < 1e-4, "advantages within a group still add up to 0"
    of_right = together[:, ::4].mean()
    assert abs(float(of_right)) < 0.1, "answers of reward 1 are worth no more than others"


def sample(prompt: str, completion: str, right: float, finish: str = "stop") -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "rewards": {"final-number": right}, "finish_reason": finish}


def test_pairs_are_of_a_right_and_a_wrong_answer_to_one_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [
        entry
        for number in range(8)
        for entry in (
            sample(f"{number}?", f"right {number}", 1.0),
            sample(f"{number}?", f"right {number}", 1.0),
            sample(f"{number}?", f"wrong {number}", 0.0),
            sample(f"{number}?", "cut", 0.0, "length"),
        )
    ]
    samples.append(sample("only wrong?", "wrong", 0.0))
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    monkeypatch.setattr("sys.argv", ["make_pairs.py", str(tmp_path), "--to", str(tmp_path / "to")])
    parts("preferences/make_pairs.py")["main"]()
    files = [(tmp_path / "to" / name).read_text() for name in ("pairs.jsonl", "pairs-held-out.jsonl")]
    training, held_out = ([json.loads(line) for line in text.splitlines()] for text in files)
    assert len(training) == 6 and len(held_out) == 2
    for pair in training + held_out:
        number = pair["prompt"][0]
        assert pair == {"prompt": f"{number}?", "chosen": f"right {number}", "rejected": f"wrong {number}"}
    assert not {pair["prompt"] for pair in training} & {pair["prompt"] for pair in held_out}
    (tmp_path / "samples.jsonl").write_text("")
    with pytest.raises(SystemExit) as ended:
        parts("preferences/make_pairs.py")["main"]()
    assert ended.value.code == 2 and "no prompt has answers both right and wrong" in capsys.readouterr().err


def test_gsm8k_becomes_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = {"question": "How many?", "answer": "First 700 + 534.\n#### 1,234"}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(problem) + "\n")
    monkeypatch.setattr("sys.argv", ["make_prompts.py", "--from", str(tmp_path), "--to", str(tmp_path / "to")])
    parts("gsm8k/make_prompts.py")["main"]()
    (line,) = (tmp_path / "to" / "test.jsonl").read_text().splitlines()
    made = json.loads(line)
    assert made["answer"] == "1234"
    assert made["prompt"][0]["content"].startswith("How many?\n")
    with pytest.raises(ValueError, match="####"):
        parts("gsm8k/make_prompts.py")["record"]({"question": "How many?", "answer": "12"})


@pytest.mark.parametrize(("layers", "every", "ends", "left_out"), [(30, 3, 3, 8), (6, 2, 1, 2), (6, 3, 3, 0)])
def test_a_student_keeps_its_first_and_last_layers(layers: int, every: int, ends: int, left_out: int) -> None:
    kept = parts("distill-layers/make_student.py")["kept_layers"](layers, every, ends)
    assert len(kept) == layers - left_out and kept == sorted(set(kept))
    assert kept[:ends] == list(range(ends)) and kept[-ends:] == list(range(layers - ends, layers))


def test_a_student_is_a_model_folder_that_answers_in_plain_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = save_tiny_model(tmp_path / "whole"), tmp_path / "run"
    layers = json.loads((whole / "config.json").read_text())["num_hidden_layers"]
    monkeypatch.setattr(
        "sys.argv", ["make_student.py", str(whole), "--to", str(run / "model"), "--every", "2", "--ends", "0"]
    )
    parts("distill-layers/make_student.py")["main"]()
    config = json.loads((run / "model" / "config.json").read_text())
    assert config["num_hidden_layers"] == (layers + 1) // 2
    answer = parts("answer.py")
    monkeypatch.setattr("sys.argv", ["answer.py", str(run), str(whole)])
    answer["main"]()
    lines = [line for line in capsys.readouterr().out.splitlines() if "State the final answer" in line]
    assert len(lines) == 2 * len(answer["QUESTIONS"]) and lines[0].startswith(str(run / "model"))
    monkeypatch.setattr("sys.argv", ["answer.py", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        answer["main"]()
    assert ended.value.code == 2 and "holds no model/ and no adapter/" in capsys.readouterr().err
