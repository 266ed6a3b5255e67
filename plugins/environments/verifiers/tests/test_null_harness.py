"""With a harness of the library's own, which is a process for each segment."""

import os
import sys
from pathlib import Path

import pytest
from game_play import observations, play

from rlhf_core.errors import ConfigError

pytest.importorskip("verifiers", reason="needs verifiers: make env-clients")

pytestmark = pytest.mark.slow

UV = Path(sys.executable).with_name("uv")
CALL = '<tool_call>{"name": "sum_add", "arguments": {"first": 2, "second": 3}}</tool_call>'


@pytest.mark.skipif(not UV.exists(), reason="needs uv: make env-clients")
def test_tools_of_a_taskset(monkeypatch):
    monkeypatch.setenv("PATH", f"{UV.parent}{os.pathsep}{os.environ['PATH']}")
    (played,) = play(CALL, "It is 5.", env="sums", timeout_seconds=300.0)
    (row,) = played.rows
    assert "Add two numbers." in row.text and row.text.endswith("user: What is 2 + 3?<eos>\nassistant: ")
    assert observations(played) == ["it is 5"]
    assert (
        played.reward,
        played.rows[0].columns["environment"]["own/said"],
        played.rows[0].columns["environment"]["num_turns"],
    ) == (1.0, 1.0, 2.0)


def test_nothing_is_fetched_where_there_is_no_uv(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="needs uv, which is not in PATH"):
        play(env="sums", num_tasks=1)
