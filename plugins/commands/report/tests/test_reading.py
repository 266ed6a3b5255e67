"""What curves are called, and how large their labels are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib import rc_params_from_file

from rlhf_report import build_report
from rlhf_report.data import Run, read_run
from rlhf_report.figures import figures
from rlhf_report.plots import _DPI, _SIZE_INCHES, STYLE, collect
from rlhf_report.samples import SampleChoice

REWARD, EVAL = (next(figure for figure in figures() if figure.name == name) for name in ("reward", "eval"))
PHONE_PIXELS = 350
"""What margins leave of 420."""


def run_of(lines, rewards=("exact-match",)):
    return Run(
        path=Path("run"),
        name="run",
        lines=lines,
        samples=SampleChoice(groups={}, total=0),
        config={"rewards": [{"name": name, "label": name} for name in rewards]},
        manifest={},
        summary={},
    )


def labels(figure, run):
    return [each.label for each in collect(figure, [run])]


def test_one_curve_has_one_name():
    alike = [{"step": step, "reward/mean": step / 9, "reward/exact-match": step / 9} for step in (1, 2)]
    assert labels(REWARD, run_of(alike)) == ["weighted score", "exact-match"]
    never = [{"step": step, "reward/mean": 0.0, "reward/a": 0.0, "reward/b": 0.0} for step in (1, 2)]
    assert labels(REWARD, run_of(never)) == ["weighted score", "a", "b"], "that one is never given is to be seen"


def test_the_held_out_score_is_called_as_on_its_card():
    lines = [{"step": 2, "eval/score": 0.5, "eval/exact-match": 0.5, "eval/brevity": 0.5}]
    run = run_of([{"step": 0, "eval/score": 0.25}, *lines])
    assert labels(EVAL, run) == ["exact-match", "brevity"]
    assert labels(EVAL, run_of([{"step": 2, "eval/score": 0.5}], rewards=())) == ["score"]


@pytest.mark.slow
def test_titles_name_the_algorithm_and_the_folder(tmp_path: Path, make_run):
    folder = make_run(tmp_path / "first", episodes=2)
    assert "<h1>PPO run: first</h1>" in build_report([folder]).read_text()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    assert "<h1>bare</h1>" in build_report([read_run(tmp_path / "bare").path]).read_text()


@pytest.mark.parametrize("text", ["font.size", "legend.fontsize"])
def test_labels_are_readable_on_a_phone(text):
    picture = _SIZE_INCHES[0] * _DPI
    style = rc_params_from_file(STYLE, use_default_template=False)
    pixels = style[text] / 72 * _DPI * PHONE_PIXELS / picture
    assert pixels >= 9
