"""Rules that look at the text, its length or its layout."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_reward_rules import matching
from rlhf_reward_rules.config import RegexConfig
from rlhf_reward_rules.exact_match import exact_match
from rlhf_reward_rules.format_tags import format_tags
from rlhf_reward_rules.length import length
from rlhf_reward_rules.overlong_penalty import overlong_penalty
from rlhf_reward_rules.regex import build as build_regex
from rlhf_reward_rules.regex import regex
from rlhf_reward_rules.repetition_penalty import repeated_share, repetition_penalty


def rollout(completion="", answer=None, num_tokens=0, ids=None, **metadata):
    ids = tuple(range(num_tokens)) if ids is None else tuple(ids)
    return SimpleNamespace(
        sample_id=7, completion=completion, answer=answer, completion_ids=ids, sampled_ids=ids, metadata=metadata
    )


@pytest.mark.parametrize(
    ("completion", "answer", "options", "score"),
    [
        ("12", "12", {}, 1.0),
        (" 12\n", "12", {}, 1.0),
        (" 12\n", "12", {"strip": False}, 0.0),
        ("13", "12", {}, 0.0),
        ("", "12", {}, 0.0),
        ("12", 12, {}, 1.0),
        ("Yes", "yes", {}, 0.0),
        ("Yes", "yes", {"ignore_case": True}, 1.0),
        ("b", ["a", "b"], {}, 1.0),
        ("So 3, no: #### 12", "12", {"extract": r"#### (\d+)"}, 1.0),
        ("1 then 12", "12", {"extract": r"\d+"}, 1.0),
        ("none", "12", {"extract": r"\d+"}, 0.0),
    ],
)
def test_exact_match(completion, answer, options, score):
    assert exact_match([rollout(completion, answer)], **options) == [score]


@pytest.mark.parametrize("answer", [None, []])
def test_exact_match_without_an_answer_names_the_sample(answer):
    with pytest.raises(ValueError, match="sample 7 lacks an answer"):
        exact_match([rollout("12", answer)])


@given(st.lists(st.tuples(st.text(), st.text()), max_size=5))
def test_exact_match_is_one_exactly_for_equal_texts(pairs):
    scores = exact_match([rollout(text, answer) for text, answer in pairs], strip=False)
    assert scores == [float(text == answer) for text, answer in pairs]


def test_regex_modes():
    samples = [rollout("say YES now"), rollout("yes")]
    assert regex(samples, pattern="(?i)yes") == [1.0, 1.0]
    assert regex(samples, pattern="(?i)yes", mode="fullmatch") == [0.0, 1.0]
    assert build_regex(RegexConfig(pattern="yes"), None)(samples) == [0.0, 1.0]


def test_regex_pattern_is_checked_with_the_options():
    with pytest.raises(ValueError, match="not a regular expression"):
        RegexConfig(pattern="(")
    with pytest.raises(ValueError, match="its groups nest too deeply"):
        RegexConfig(pattern="(" * 5000 + "a" + ")" * 5000)


BACKTRACKS = "(a|aa)+$"


@pytest.mark.parametrize("pattern", [BACKTRACKS, r"(a|aa)+\1$"])
def test_an_answer_on_which_a_pattern_blows_up_is_no_match_and_is_said(pattern, monkeypatch, caplog):
    monkeypatch.setattr(matching, "SECONDS_PER_ANSWER", 0.05)
    samples = [rollout("a" * 200 + "b"), rollout("aaaa"), rollout("a" * 200 + "b")]
    assert regex(samples, pattern=pattern) == [0.0, 1.0, 0.0]
    assert caplog.text.count("on the answer of sample 7") == 1
    assert exact_match([rollout("a" * 200 + "b", "12")], extract=pattern) == [0.0]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("peak", [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]),
        ("at-most", [1.0, 1.0, 1.0, 0.5, 0.0, 0.0]),
        ("at-least", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
        ("shorter", [1.0, 0.5, 0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_length_shapes(shape, expected):
    samples = [rollout(num_tokens=number) for number in (0, 5, 10, 15, 20, 40)]
    assert length(samples, target_tokens=10, shape=shape) == pytest.approx(expected)


def test_length_needs_a_target():
    with pytest.raises(ValueError, match="target_tokens"):
        length([rollout()], target_tokens=0)


def test_overlong_penalty_falls_linearly_in_the_buffer():
    samples = [rollout(num_tokens=number) for number in (0, 6, 8, 10, 30)]
    assert overlong_penalty(samples, max_tokens=10, buffer_tokens=4) == pytest.approx([0, 0, -0.5, -1, -1])
    with pytest.raises(ValueError, match="buffer_tokens"):
        overlong_penalty(samples, max_tokens=10, buffer_tokens=11)


def test_repetition_penalty_counts_repeated_ngrams():
    # Bigrams of 1 2 1 2 1: 12 21 12 21, two of four are repeats.
    samples = [rollout(ids=[1, 2, 1, 2, 1]), rollout(ids=[1, 2, 3, 4, 5]), rollout(ids=[1])]
    assert repetition_penalty(samples, ngram_tokens=2, max_penalty=3.0) == pytest.approx([-1.5, 0.0, 0.0])


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 6))
def test_repeated_share_is_a_share(ids, size):
    share = repeated_share(ids, size)
    assert 0.0 <= share < 1.0
    if len(set(ids)) == len(ids):
        assert share == 0.0


@pytest.mark.parametrize(
    ("text", "inside_only", "anywhere"),
    [
        ("<think>a</think><answer>b</answer>", 1.0, 1.0),
        ("<think>a</think>\n <answer>b</answer>\n", 1.0, 1.0),
        ("hm <think>a</think><answer>b</answer>", 0.0, 1.0),
        ("<think>a</think> so <answer>b</answer> done", 0.0, 1.0),
        ("<answer>b</answer><think>a</think>", 0.0, 0.0),
        ("<think>a</think>", 0.0, 0.0),
        ("<think> </think><answer>b</answer>", 0.0, 0.0),
        ("<think>a<answer>b</answer></think>", 0.0, 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0, 0.0),
        ("</think>a<think><answer>b</answer>", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_format_tags(text, inside_only, anywhere):
    assert format_tags([rollout(text)]) == [inside_only]
    assert format_tags([rollout(text)], allow_outside=True) == [anywhere]
