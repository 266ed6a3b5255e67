"""The three environments in a process of their own: episodes, rewards and measurements are those without."""

from __future__ import annotations

import pytest

from rlhf_core.config.problems import Problems
from rlhf_episodes import play as play_module
from rlhf_episodes.selected import resolve_environment
from rlhf_testing.contracts import EnvironmentContract
from rlhf_testing.episodes import episode_tokenizer, play_episodes

FILE = '''
def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b


def fail(text: str) -> str:
    """Nothing."""
    return text
'''
CALLS = (
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "one"}}</tool_call>',
    '<tool_call>{"name": "none"}</tool_call><tool_call>{"name": "fail", "arguments": {"text": "x"}}</tool_call>',
)
TURNS = {"prompt": [{"role": "user", "content": "Hi"}], "turns": ["And?", {"role": "user", "content": "So?"}]}
PLAYS = {
    "guess-number": {"chat": False, "replies": [str(number) for number in range(10)]},
    "tools": {"chat": True, "replies": CALLS, "functions": ["./tools.py:add", "./tools.py:fail"]},
    "conversation": {"chat": True, "replies": ["Yes."], "records": [TURNS, {**TURNS, "turns": []}]},
}


def select(name, **options):
    problems = Problems()
    environment = resolve_environment({"name": name, "max_turns": 4, **options}, problems)
    problems.raise_if_any("environment")
    return environment


@pytest.mark.parametrize("name", PLAYS)
def test_nothing_changes(name, tmp_path, monkeypatch):
    monkeypatch.setattr(play_module, "PATIENCE_SECONDS", 60.0)  # on a busy machine, too, a round waits for all
    (tmp_path / "tools.py").write_text(FILE)
    play = dict(PLAYS[name])
    tokenizer = episode_tokenizer(chat=play.pop("chat"))
    own = {"functions": play.pop("functions")} if "functions" in play else {}
    here, there = (
        play_episodes(
            select(name, isolate=isolate, **own),
            tokenizer,
            num_prompts=len(play.get("records", [])) or 12,
            folder=tmp_path,
            **play,
        )
        for isolate in (False, True)
    )
    assert there.values == here.values
    assert there.sampled == here.sampled
    assert any(len(each.rows[0].turns) > 1 for each in here.played)


def test_tools_are_in_a_process_of_their_own_unless_the_run_file_says_no():
    functions = ["tools.py:add"]
    assert select("tools", functions=functions).config.isolate is True
    assert not select("tools", functions=functions, isolate=False).config.isolate
    assert select("conversation").config.isolate is False


class TestTools(EnvironmentContract):
    plugin = "tools"
    replies = CALLS

    @classmethod
    def make_options(cls, folder):
        (folder / "tools.py").write_text(FILE)
        return {"functions": [f"{folder}/tools.py:add"]}
