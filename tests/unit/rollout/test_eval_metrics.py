"""avg@k, pass@k, maj@k and their intervals against values computed by hand."""

import itertools

import pytest

from rlhf_core.config.sections import EvalSetOptions
from rlhf_core.rollout.eval_metrics import (
    EvaluationRow,
    bootstrap_intervals,
    evaluation_metrics,
    final_answer,
    majority_score,
    pass_at,
)


def row(prompt, score, answer="", *, sampled=True, set_index=0):
    rewards = {} if score is None else {"right": score}
    return EvaluationRow(rewards, 5, False, sampled, prompt, answer, set_index)


FOUR = [
    *(row(0, score, answer) for score, answer in [(1.0, "7"), (1.0, "7"), (0.0, "8"), (0.0, "9")]),
    *(row(1, score, answer) for score, answer in [(0.0, "1"), (0.0, "1"), (0.0, "1"), (1.0, "2")]),
    *(row(2, score, answer) for score, answer in [(0.0, "3"), (0.0, "4"), (0.0, "5"), (0.0, "6")]),
    row(0, 1.0, sampled=False),
    row(1, 0.0, sampled=False),
    row(2, 0.0, sampled=False),
]


def test_of_four_answers_to_three_prompts():
    found = evaluation_metrics(FOUR, [(None, EvalSetOptions(samples_per_prompt=4))])
    assert found["eval/score"] == pytest.approx(1 / 3)
    assert found["eval/avg@4"] == pytest.approx((2 / 4 + 1 / 4 + 0) / 3)
    # pass@2: 1 - C(2,2)/C(4,2) = 5/6; 1 - C(3,2)/C(4,2) = 1/2; 0
    assert found["eval/pass@1"] == pytest.approx((2 / 4 + 1 / 4 + 0) / 3)
    assert found["eval/pass@2"] == pytest.approx((5 / 6 + 1 / 2 + 0) / 3)
    assert found["eval/pass@4"] == pytest.approx((1 + 1 + 0) / 3)
    # The most frequent: "7", right; "1", wrong; four that are equally frequent, all wrong.
    assert found["eval/maj@4"] == pytest.approx(1 / 3)
    assert found["eval/sampled/num_prompts"] == found["eval/num_prompts"] == 3
    assert "eval/pass@3" not in found


def test_named_sets_have_keys_of_their_own_and_the_first_gives_the_score():
    options = EvalSetOptions(samples_per_prompt=1)
    rows = [
        row(0, 0.25, sampled=False),
        row(0, 1.0),
        row(1, 0.75, sampled=False, set_index=1),
        row(1, 0.0, set_index=1),
    ]
    found = evaluation_metrics(rows, [("easy", options), ("hard", options)])
    assert (found["eval/easy/score"], found["eval/hard/score"], found["eval/score"]) == (0.25, 0.75, 0.25)
    assert (found["eval/easy/pass@1"], found["eval/hard/pass@1"]) == (1.0, 0.0)
    assert not [key for key in found if key.startswith("eval/avg@")]


@pytest.mark.parametrize(("n", "correct"), [(5, 0), (5, 2), (5, 5), (1, 1)])
def test_pass_at_k_is_the_share_of_all_draws_with_a_right_one(n, correct):
    answers = [True] * correct + [False] * (n - correct)
    for k in range(1, n + 1):
        draws = list(itertools.combinations(answers, k))
        assert pass_at(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_a_tie_counts_as_the_mean_of_those_tied():
    rows = [row(0, 1.0, "a"), row(0, 0.0, "b"), row(0, 0.0, "c")]
    assert majority_score(rows, "right") == pytest.approx(1 / 3)
    assert majority_score([row(0, None, "")], "right") == 0.0


def test_a_dropped_answer_counts_as_wrong_and_does_not_vote():
    rows = [row(0, 1.0, "a"), row(0, None, ""), row(0, None, ""), row(0, 1.0, "a")]
    found = evaluation_metrics(rows, [(None, EvalSetOptions(samples_per_prompt=4))])
    assert (found["eval/avg@4"], found["eval/pass@4"], found["eval/maj@4"]) == (0.5, 1.0, 1.0)
    assert found["eval/pass@2"] == pytest.approx(5 / 6)


def test_what_an_answer_comes_to():
    assert final_answer(r"so \boxed{3} and then \boxed{ 4 }") == "4"
    assert final_answer("<answer>a\n b</answer> bye") == "a b"
    assert final_answer("2+2\n#### 4\n") == "4"
    assert final_answer("  1  2 ") == "1 2"


def test_an_interval_holds_the_mean_and_is_the_same_each_time():
    values = {"score": [0.0] * 30 + [1.0] * 70, "one": [0.5], "same": [2.0] * 9}
    found = bootstrap_intervals(values)
    assert found == bootstrap_intervals(values)
    low, high = found["score"]
    # Of a share of 0.7 of 100 prompts the standard error is 0.0458: 95% are about 0.61 to 0.79.
    assert (low, high) == pytest.approx((0.61, 0.79), abs=0.025)
    assert found["one"] == (0.5, 0.5) and found["same"] == (2.0, 2.0)
