from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_pages import known_sample, sample_card_script
from rlhf_report.data import Run
from rlhf_report.figures import figures
from rlhf_report.numbers import duration, number
from rlhf_report.plots import collect, draw, smooth
from rlhf_report.samples import SampleChoice, choose_samples

SCORE = {"": 0.5, "_low": 0.25, "_high": 0.75}
scored = st.lists(st.fixed_dictionaries({"score": st.floats(-9, 9), "policy_version": st.integers(0, 4)}), max_size=60)


@given(samples=scored)
def test_chosen_samples_are_what_they_are_called(samples):
    numbered = [{**sample, "sample_id": index} for index, sample in enumerate(samples)]
    choice = choose_samples(iter(numbered), per_group=5)
    scores = sorted((sample["score"] for sample in samples), reverse=True)
    assert choice.total == len(samples)
    assert [sample["score"] for sample in choice.groups.get("best", [])] == scores[:5]
    assert [sample["score"] for sample in choice.groups.get("worst", [])] == scores[::-1][:5]
    assert len(choice.groups.get("random", [])) == min(5, len(samples))
    versions = {sample["policy_version"] for sample in samples}
    for name, version in (("first", min), ("last", max)):
        if len(versions) > 1:
            assert {sample["policy_version"] for sample in choice.groups[name]} == {version(versions)}
        else:
            assert name not in choice.groups
    assert choose_samples(iter(numbered), per_group=5) == choice


def test_samples_without_a_score_count_by_their_rewards_or_not_at_all():
    samples = [{"rewards": {"a": 1.0, "b": 2.0}}, {"score": None}, {"score": 2.0}]
    groups = choose_samples(samples).groups
    assert groups["best"] == [samples[0], samples[2]]
    assert len(groups["random"]) == 3


def test_turns_of_an_episode_are_kept_and_what_is_none_is_left_out():
    call = {"name": "add", "arguments": {"a": 1}}
    turns = [
        {"role": "policy", "text": "4", "reward": 0.5, "tool_calls": [call]},
        {"role": "environment", "text": "higher"},
        {"role": "policy", "text": "7", "tool_calls": 3},
    ]
    found = known_sample({"completion": "4\n7", "branch": 1, "turns": turns})
    assert found["turns"] == [*turns[:2], {"role": "policy", "text": "7"}]
    for wrong in ("text", {"role": "policy"}, [1], 5, None):
        assert known_sample({"completion": "4", "turns": wrong}) == {"completion": "4"}


def test_smoothing_keeps_a_constant_and_is_a_mean():
    assert smooth([2.0, 2.0, 2.0], 5) == [2.0, 2.0, 2.0]
    assert smooth([0.0, 1.0], 3) == [0.0, pytest.approx(1 / 1.5)]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.4551, "0.455"), (12, "12"), (1234.5, "1,234"), (1.87e-6, "1.87e-06"), (None, None), (True, None), ("x", None)],
)
def test_numbers_for_people(value, text):
    assert number(value) == text


def test_what_counts_as_nothing_is_the_same_in_text_and_in_the_scripts_of_samples():
    (bound,) = re.findall(r"isNothing = .*Math.abs\(value\) < (\S+);", sample_card_script())
    assert number(0.99 * float(bound)) == "0" != number(1.01 * float(bound))


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.2, "4.2 s"), (131.2, "2 min 11 s"), (3725, "1 h 02 min"), (None, None)]
)
def test_durations_for_people(seconds, text):
    assert duration(seconds) == text


def test_figures_have_names_of_their_own():
    assert len({figure.name for figure in figures()}) == len(figures())


def test_evaluation_sets_have_a_plot_of_their_scores_with_intervals_from_step_0():
    both = {f"eval/{name}score{end}": value for name in ("", "hard/") for end, value in SCORE.items()}
    run = Run(
        path=Path("run"),
        name="run",
        lines=[{"step": 0, **both}, {"step": 3, **both}],
        samples=SampleChoice(groups={}, total=0),
        config={},
        manifest={},
        summary={},
    )
    chosen = {figure.name: figure for figure in figures()}
    for name, label in (("eval", "score"), ("eval-sets", "hard/score")):
        (own,) = collect(chosen[name], [run])
        assert (own.label, own.steps, own.values, own.band) == (label, [0, 3], [0.5, 0.5], ([0.25] * 2, [0.75] * 2))
    assert {"eval", "eval-sets"} <= set(draw([run]))
