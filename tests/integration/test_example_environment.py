"""The example distribution of environments is found, keeps the contract and is played, as one that was installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import PATIENCE_SECONDS

from rlhf_core.config.problems import Problems
from rlhf_episodes.selected import resolve_environment
from rlhf_testing.episodes import PlayedEpisodes, episode_tokenizer, play_episodes

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "environment"


@pytest.fixture
def installed(install: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    text = (FOLDER / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition('[project.entry-points."rlhf.environments"]')[2].partition("[")[0]
    targets = dict(re.findall(r'^(\S+) = "(\S+)"$', section, flags=re.MULTILINE))
    install("rlhf-example-games", {"rlhf.environments": targets})
    monkeypatch.syspath_prepend(str(FOLDER / "src"))
    yield
    for name in [name for name in sys.modules if name.startswith("rlhf_example_games")]:
        del sys.modules[name]


def played(name: str, replies: list[str], **options: Any) -> PlayedEpisodes:
    problems = Problems()
    environment = resolve_environment({"name": name}, problems)
    problems.raise_if_any("environment")
    assert environment is not None
    return play_episodes(environment, episode_tokenizer(chat=True), replies=replies, num_prompts=6, **options)


@pytest.mark.usefixtures("installed")
def test_both_are_played() -> None:
    corridor = played("corridor", ["left", "right"])
    assert all(row.text.startswith("user: You stand at ") for each in corridor.played for row in each.rows)
    assert max(each.reward for each in corridor.played) > 0.5 > min(each.reward for each in corridor.played)
    call = '<tool_call>{"name": "deposit", "arguments": {"amount": 3}}</tool_call>'
    account = played("account", [call, "Done."], records=[{"prompt": "Pay in 3.", "answer": "3"}])
    assert {each.reward for each in account.played} == {0.0, 1.0}


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_its_own_tests_pass(tmp_path: Path) -> None:
    paths = [str(tmp_path / "site"), str(FOLDER / "src")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", FOLDER / "tests"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
