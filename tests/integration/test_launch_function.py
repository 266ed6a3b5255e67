"""`rlhf_strategies.launch`: a function of one's own in several processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from running import PATIENCE_SECONDS, forked_ranks

from rlhf_core.errors import ConfigError, RlhfError, UserInputError
from rlhf_strategies import launch

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "launch.md").read_text(encoding="utf-8")
FAULTY = """
import os, time
from rlhf_core.errors import ConfigError

def known(where):
    if os.environ["RANK"] == "1":
        raise ConfigError("is not there", where=where, hint="make it")
    time.sleep(600)

class Nested:
    @staticmethod
    def unknown():
        raise ZeroDivisionError("by zero")

def cut():
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    (tmp_path / "faulty_ranks.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slow
def test_the_code_of_the_page_adds_up_over_two_ranks(tmp_path):
    for name, source in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / f"{name}.py").write_text(source)
    subprocess.run([sys.executable, "start.py"], cwd=tmp_path, check=True, timeout=PATIENCE_SECONDS)
    assert (tmp_path / "total.txt").read_text() == "2 ranks: 3"


def test_an_error_of_a_rank_is_raised_here_and_names_it(faulty):
    with forked_ranks(), pytest.raises(ConfigError, match="is not there") as caught:
        launch("faulty_ranks:known", 2, arguments=["a.yaml"], timeout_seconds=1.0)
    assert (caught.value.where, caught.value.hint) == ("rank 1, a.yaml", "make it")


def test_any_other_error_and_a_killed_rank_are_named(faulty, capfd):
    import faulty_ranks

    with forked_ranks(), pytest.raises(RlhfError, match="ZeroDivisionError: by zero") as caught:
        launch(faulty_ranks.Nested.unknown, 1)
    assert caught.value.where == "rank 0" and "faulty_ranks.py" in capfd.readouterr().err
    with forked_ranks(), pytest.raises(RlhfError, match=r"rank 0 \(pid \d+\) was ended by SIGKILL"):
        launch(faulty_ranks.cut, 1)


def test_what_cannot_be_started_is_refused():
    with pytest.raises(UserInputError, match="other processes cannot import"):
        launch(lambda: None, 2)
    with pytest.raises(UserInputError, match="at least 1 process, got 0"):
        launch("faulty_ranks:known", 0)
