"""A plan runs no file within a source of prompts: its filter, or a source of a mixture."""

import pytest
import yaml

from rlhf_cli.main import run as rlhf
from rlhf_testing.runs import tiny_run

FUNCTION = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()

def letters(context, *, size: int = 20):
    return [{"prompt": "abc", "answer": "a"}] * size
"""
KEPT = {"name": "sort-digits", "filter": "./mine.py:letters"}
MIXED = {"name": "mixture", "sources": [{"name": "./mine.py:letters"}]}


@pytest.mark.parametrize(
    ("where", "changes"),
    [
        ("prompts", {"prompts": KEPT}),
        ("prompts", {"prompts": MIXED}),
        ("eval.prompts", {"eval": {"prompts": KEPT}}),
        ("eval.sets.held.prompts", {"eval": {"sets": {"held": {"prompts": KEPT}}}}),
        ("eval.sets.held.prompts", {"eval": {"sets": {"held": {"prompts": MIXED}}}}),
    ],
)
def test_a_plan_runs_no_file_within_a_source(tmp_path, capsys, monkeypatch, where, changes):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTION)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_run(changes)))
    assert rlhf(["plan", "run.yaml"]) == 2
    said = capsys.readouterr().err
    assert f"{where}: rlhf plan does not run code from files, and the run names {tmp_path / 'mine.py'}" in said
    assert not (tmp_path / "mine.ran").exists()
