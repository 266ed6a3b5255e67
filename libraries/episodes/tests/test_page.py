"""The code blocks of docs/environments.md, docs/agents.md and docs/long-episodes.md work as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf_core.config.load import load_run
from rlhf_core.config.problems import Problems
from rlhf_core.config.resolve import resolve, resolve_reward
from rlhf_core.rollout.samples import rollout_of
from rlhf_episodes.selected import resolve_environment
from rlhf_testing.episodes import episode_tokenizer, play_episodes

PAGES = [
    Path(__file__).resolve().parents[3] / "docs" / name for name in ("environments.md", "agents.md", "long-episodes.md")
]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The pages' files, in the working folder."""
    monkeypatch.chdir(tmp_path)
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", text, flags=re.DOTALL)
    for name, text in found:
        (tmp_path / name).write_text(text)
    return [name for name, _ in found]


def select(name):
    problems = Problems()
    environment = resolve_environment({"name": name}, problems)
    problems.raise_if_any("page")
    return environment


def test_the_run_file_is_right(files):
    python = ["guess.py", "sums.py", "my_tools.py", "notes.py", "agent.py", "archive.py"]
    runs = ["guess.yaml", "tools.yaml", "several.yaml", "mixed.yaml", "user.yaml", "archive.yaml"]
    assert sorted(files) == sorted([*python, *runs])
    resolved = resolve(load_run("guess.yaml"))
    assert resolved.sections["environment"].name.endswith("guess.py:Guess")
    assert resolved.reward_weights == {"environment": 1.0}


@pytest.mark.parametrize(
    ("name", "rewards"),
    [("several.yaml", ["environment"]), ("mixed.yaml", ["environment"]), ("user.yaml", ["environment", "judge"])],
)
def test_the_other_run_files_are_right(files, name, rewards):
    assert list(resolve(load_run(name)).reward_weights) == rewards


def test_the_game_is_played(files):
    done = play_episodes(select("./guess.py:Guess"), episode_tokenizer(chat=False), replies=["4", "7"], num_prompts=12)
    assert {each.reward for each in done.played} == {0.0, 1.0}
    assert all(row.text == "guess>" for each in done.played for row in each.rows)


def test_the_tool_is_used(files):
    call = '<tool_call>{"name": "add", "arguments": {"first": 2, "second": 3}}</tool_call>'
    records = [{"prompt": "2 + 3?", "answer": 5}, {"prompt": "2 + 4?", "answer": 6}]
    done = play_episodes(
        select("./sums.py:Sums"), episode_tokenizer(chat=True), records=records, replies=[call], num_prompts=6
    )
    assert {(each.prompt.answer, each.reward) for each in done.played} >= {(5, 1.0), (6, 0.0)}


def test_the_functions_are_called_and_the_last_turn_is_rewarded(files):
    run = load_run("tools.yaml")
    problems = Problems()
    environment = resolve_environment(run["environment"], problems)
    reward = resolve_reward(run["rewards"][0], "page")
    problems.raise_if_any("page")
    call = '<tool_call>{"name": "calculator", "arguments": {"first": 2, "operation": "*", "second": 3}}</tool_call>'
    records = [{"prompt": "2 * 3?", "answer": "6"}]
    done = play_episodes(
        environment, episode_tokenizer(chat=True), records=records, replies=[call, "It is 6"], num_prompts=6
    )
    found = [rollout_of(each.rows[-1], each) for each in done.played]
    assert any(turn.text == "6.0" for rollout in found for turn in rollout.turns if turn.role == "environment")
    right = [float(rollout.turns[-1].text.endswith("6")) for rollout in found]
    assert reward.build(reward.config, None)(found) == right
    assert set(right) == {0.0, 1.0}


def test_the_agent_asks_the_policy(files):
    records = [{"prompt": "2 + 3?", "answer": "5"}]
    done = play_episodes(
        select("./agent.py:Agent"), episode_tokenizer(chat=True), records=records, replies=["5"], num_prompts=4
    )
    assert {each.reward for each in done.played} == {0.0, 1.0}
    assert {row.text for each in done.played for row in each.rows} == {"user: 2 + 3?<eos>\nassistant: "}


def test_a_long_conversation_is_shortened(files):
    problems = Problems()
    section = {"name": "./archive.py:Archive", "max_turns": 12, "max_tokens": 200}
    environment = resolve_environment(section, problems)
    problems.raise_if_any("page")
    done = play_episodes(environment, episode_tokenizer(chat=True), replies=["1 or 2", "3"], num_prompts=12)
    assert {each.reward for each in done.played} == {0.0, 1.0}
    assert any("You have named [1, 2" in row.text for each in done.played for row in each.rows[1:])
