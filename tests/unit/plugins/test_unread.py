"""A file that is not run: its functions take any options, and nothing can be built of them."""

import json

import pytest

from rlhf_core.config.problems import Problems
from rlhf_core.errors import PluginError
from rlhf_core.plugins.selected import load
from rlhf_core.plugins.trust import NO_FILE


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text('open("was-run", "w").close()\ndef brevity(rollouts, *, size: int = 3): ...\n')
    yield "./mine.py:brevity"
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("kind", ["rewards", "environments", "algorithms", "prompts"])
def test_any_options_are_taken_and_kept(file, kind, tmp_path):
    selected = load(kind, file, trust=NO_FILE)
    assert (selected.is_unread, selected.name) == (True, f"{tmp_path}/mine.py:brevity")
    problems = Problems()
    config = problems.validate(selected.component.config, {"size": "x", "of": [1]})
    assert not len(problems) and json.loads(config.model_dump_json()) == {"size": "x", "of": [1]}
    with pytest.raises(PluginError, match="was not executed, so it cannot be built"):
        selected.build(config, None)


def test_a_file_that_is_not_there_is_an_error(file):
    with pytest.raises(PluginError, match=r"no such file: .*gone\.py"):
        load("rewards", "./gone.py:f", trust=NO_FILE)


def test_a_file_that_ends_the_process_is_an_error(tmp_path):
    path = tmp_path / "leaves.py"
    path.write_text("import sys\nsys.exit(0)\ndef f(rollouts): ...\n")
    with pytest.raises(PluginError, match=r"leaves\.py fails to run: SystemExit: 0"):
        load("rewards", f"{path}:f")
