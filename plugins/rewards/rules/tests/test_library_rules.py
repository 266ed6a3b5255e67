"""Rules that stand on a library: mathematics and JSON schemas."""

import json
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest

from rlhf_core.components import RewardContext
from rlhf_core.config import RewardCallOptions
from rlhf_core.plugins import load
from rlhf_core.rewards import RewardScorer, make_reward_spec
from rlhf_core.types import Rollout
from rlhf_reward_rules.config import JsonSchemaConfig
from rlhf_reward_rules.json_schema import build as build_json_schema
from rlhf_reward_rules.json_schema import json_schema
from rlhf_reward_rules.math_equivalence import math_equivalence

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def rollout(completion, answer=None, **metadata):
    return SimpleNamespace(sample_id=7, completion=completion, answer=answer, metadata=metadata)


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        (r"It is $\frac{1}{2}$.", "0.5", 1.0),
        (r"So \boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1.0),
        ("The answer is 12.", 12, 1.0),
        ("The answer is 13.", 12, 0.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        ("I do not know", "12", 0.0),
        ("12", ["11", "12"], 1.0),
    ],
)
def test_math_equivalence(completion, answer, score):
    assert math_equivalence([rollout(completion, answer)]) == [score]


def test_math_equivalence_can_insist_on_a_box():
    samples = [rollout("12", "12"), rollout(r"\boxed{12}", "12")]
    assert math_equivalence(samples, require_boxed=True) == [0.0, 1.0]


def test_math_equivalence_works_off_the_main_thread():
    scores = []
    thread = threading.Thread(target=lambda: scores.extend(math_equivalence([rollout("$1/3$", "1/3")])))
    thread.start()
    thread.join()
    assert scores == [1.0]


@pytest.mark.parametrize("completion", [r"\boxed{10^{10^{10}}}", "$9^{9^{9^{9}}}$"])
@pytest.mark.slow_except("$9^{9^{9^{9}}}$")
def test_math_equivalence_does_not_hang_on_a_number_too_large_to_write(completion):
    selected = load("rewards", "math-equivalence")
    policy = RewardCallOptions(timeout_seconds=1.0, on_failure="zero")
    spec = make_reward_spec(selected, selected.component.config(), RewardContext(device="cpu", seed=0), policy)
    assert spec.call_options.isolate
    with closing(RewardScorer([spec])) as scorer:
        (score,) = scorer.score([make_rollout(completion)])
    assert score == {"math-equivalence": 0.0}


@pytest.mark.slow
def test_math_equivalence_scores_the_others_of_a_batch_with_one_that_hangs():
    selected = load("rewards", "math-equivalence")
    policy = RewardCallOptions(timeout_seconds=4.0, on_failure="zero")
    spec = make_reward_spec(selected, selected.component.config(), RewardContext(device="cpu", seed=0), policy)
    batch = [make_rollout("12", sample_id) for sample_id in range(8)]
    batch[3] = make_rollout(r"\boxed{10^{10^{10}}}", 3)
    with closing(RewardScorer([spec])) as scorer:
        scores = [row["math-equivalence"] for row in scorer.score(batch)]
    assert scores == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]


def make_rollout(completion, sample_id=7):
    return Rollout(
        sample_id=sample_id,
        prompt="",
        messages=None,
        prompt_ids=(1,),
        completion=completion,
        completion_ids=(1,),
        logprobs=(0.0,),
        answer="12",
        metadata={},
        policy_version=0,
        finish_reason="stop",
    )


def test_math_equivalence_refuses_an_answer_that_is_no_mathematics():
    with pytest.raises(ValueError, match="sample 7 is not mathematics"):
        math_equivalence([rollout("12", "")])


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ('{"x": 1}', 1.0),
        ('{"x": "1"}', 0.25),
        ("[]", 0.25),
        ('{"x": 1', 0.0),
        ("NaN", 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
        ('```json\n{"x": 1}\n```', 0.0),
    ],
)
def test_json_schema(completion, score):
    assert json_schema([rollout(completion)], inline_schema=POINT, valid_json_score=0.25) == [score]


def test_json_schema_of_the_sample_and_in_a_fence():
    sample = rollout('Here:\n```json\n"a"\n```', schema={"type": "string"})
    assert json_schema([sample], inline_schema=POINT, metadata_key="schema", allow_fence=True) == [1.0]
    assert json_schema([sample], inline_schema=POINT, allow_fence=True) == [0.0]


def test_json_schema_without_a_schema_takes_all_json():
    assert json_schema([rollout("1"), rollout("one")]) == [1.0, 0.0]


def test_json_schema_refuses_a_schema_that_is_none():
    with pytest.raises(ValueError, match="not a JSON schema"):
        json_schema([rollout("1")], inline_schema={"type": "nonsense"})


def test_json_schema_file(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(POINT))
    reward = build_json_schema(JsonSchemaConfig(schema_file=str(file)), None)
    assert reward([rollout('{"x": 1}'), rollout("{}")]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="no such file"):
        JsonSchemaConfig(schema_file=str(tmp_path / "missing.json"))
    with pytest.raises(ValueError, match="not both"):
        JsonSchemaConfig(schema_file=str(file), inline_schema=POINT)
